"""What a model's weights take, counted from its spec before any memory is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from manyroots.errors import ModelError
from manyroots.models.spec import ModelSpec

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's share of the machine's memory, where there is one."""


def num_weights(spec: ModelSpec, num_head_rows: int) -> int:
    """Of a rank's spec; `num_head_rows` is its part of the head."""
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    traits = spec.traits
    attention = (q + 2 * kv) * hidden + q * hidden
    attention += (q + 2 * kv) * traits.qkv_bias + hidden * traits.o_bias
    attention += 2 * dim * traits.qk_norm
    inter = spec.intermediate_size
    dense = 3 * hidden * inter + (2 * inter + hidden) * traits.mlp_bias
    num_sparse, sparse = len(traits.sparse_layers), 0
    if traits.experts is not None:
        each = 3 * hidden * traits.experts.intermediate_size
        sparse = traits.experts.num_experts * (hidden + each)
    layers = spec.num_layers * (attention + 2 * hidden)
    layers += (spec.num_layers - num_sparse) * dense + num_sparse * sparse
    head = 0 if spec.tie_word_embeddings else num_head_rows * hidden
    return spec.vocab_size * hidden + layers + hidden + head


def check_fits(num_bytes: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are larger than all of the device's memory."""
    most = device_bytes(device)
    if num_bytes > most:
        raise ModelError(
            f"{name} has {num_bytes / 2**30:.1f} GiB of weights as {dtype}, by its config, and all "
            f"memory of {device} is {most / 2**30:.1f} GiB. Choose a smaller model, --dtype "
            "bfloat16 or a higher --tensor-parallel-size; or correct the config."
        )


def device_bytes(device: torch.device) -> int:
    """All memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return machine
