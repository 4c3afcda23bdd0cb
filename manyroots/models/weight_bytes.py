"""What a model's weights take, counted from its spec before any memory is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from manyroots.errors import ModelError
from manyroots.kernels.mxfp4 import padded_bytes
from manyroots.kernels.packed import can_pack
from manyroots.layers.spec import BlockSpec, DenseSpec, ExpertsSpec, SharedSpec
from manyroots.layers.weights.formats import Mxfp4Format, WeightFormat
from manyroots.models.spec import ModelSpec

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's share of the machine's memory, where there is one."""


def weight_bytes(
    spec: ModelSpec, num_head_rows: int, dtype: torch.dtype, kept: WeightFormat | None
) -> int:
    """What a rank's weights take. In FP8, all but the embedding and the head count as bytes: norms,
    biases and routers are too few to matter. In MXFP4, experts' matrices alone do."""
    count = num_weights(spec, num_head_rows)
    if kept is None:
        return count * dtype.itemsize
    if isinstance(kept, Mxfp4Format):
        experts = [layer.experts for layer in spec.layers if layer.experts is not None]
        numbers = sum(e.num_experts * 3 * spec.hidden_size * e.intermediate_size for e in experts)
        packed = sum(_mxfp4_bytes(e, spec.hidden_size) for e in experts)
        return (count - numbers) * dtype.itemsize + packed
    head = 0 if spec.tie_word_embeddings else num_head_rows * spec.hidden_size
    whole = spec.vocab_size * spec.hidden_size + head
    products = count - whole
    scales = 0 if kept.block is None else 4 * products // kept.block[1]
    return whole * dtype.itemsize + products + scales


def _mxfp4_bytes(spec: ExpertsSpec, hidden: int) -> int:
    inner = spec.intermediate_size
    both = padded_bytes(2 * inner, hidden) + padded_bytes(hidden, inner)
    return spec.num_experts * both


def num_weights(spec: ModelSpec, num_head_rows: int) -> int:
    """Of a rank's spec; `num_head_rows` is its part of the head."""
    hidden = spec.hidden_size
    layers = sum(
        sum(mixer.num_weights(hidden) for mixer in layer.mixers)
        + _of_block(layer.feed_forward, hidden)
        + (4 if layer.has_post_norms else 2) * hidden
        for layer in spec.layers
    )
    head = 0 if spec.tie_word_embeddings else num_head_rows * hidden
    return spec.vocab_size * hidden + layers + hidden + head


def _of_block(spec: BlockSpec, hidden: int) -> int:
    if isinstance(spec, SharedSpec):
        gate = 0 if spec.gate is None else hidden
        return _of_block(spec.experts, hidden) + _of_block(spec.shared, hidden) + gate
    inner = spec.intermediate_size
    one = 3 * hidden * inner + (2 * inner + hidden) * spec.bias
    if isinstance(spec, DenseSpec):
        return one
    return spec.num_experts * (hidden + spec.bias + one)


def check_fits(num_bytes: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are larger than all of the device's memory."""
    most = device_bytes(device)
    if num_bytes > most:
        raise ModelError(
            f"{name} has {num_bytes / 2**30:.1f} GiB of weights as {dtype}, by its config, and all "
            f"memory of {device} is {most / 2**30:.1f} GiB. Choose a smaller model, --dtype "
            "bfloat16 or a higher --tensor-parallel-size; or correct the config."
        )


def may_pack(num_bytes: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this size may lie in memory twice for faster products (`kernels/packed`):
    where the machine gains by it and both take an eighth of its memory at most."""
    return can_pack(device, dtype) and 2 * num_bytes <= device_bytes(device) // 8


def device_bytes(device: torch.device) -> int:
    """All memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return machine
