"""Bytes of a model's weights, counted from its spec before any memory is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from manyroots.errors import ModelError
from manyroots.kernels.packed import can_pack
from manyroots.layers.spec import BlockSpec, DenseSpec, ExpertsSpec, SharedSpec
from manyroots.layers.weights.formats import WeightFormat
from manyroots.models.spec import ModelSpec

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's memory limit, if there is one."""


def weight_bytes(
    spec: ModelSpec, num_head_rows: int, dtype: torch.dtype, kept: WeightFormat
) -> int:
    """Bytes of a rank's weights. All but the embedding and the head count in the format's size:
    norms, biases and routers are too few to matter. Larger products that are kept unquantized take
    more, which `load` counts once their matrices are made."""
    head = 0 if spec.tie_word_embeddings else num_head_rows * spec.hidden_size
    whole = spec.vocab_size * spec.hidden_size + head
    experts = [layer.experts for layer in spec.all_layers if layer.experts is not None]
    of_experts = sum(e.num_experts * 3 * spec.hidden_size * e.intermediate_size for e in experts)
    rest = num_weights(spec, num_head_rows) - whole - of_experts
    return (
        whole * dtype.itemsize
        + kept.num_bytes(rest, dtype)
        + sum(_expert_bytes(e, spec.hidden_size, dtype, kept) for e in experts)
    )


def _expert_bytes(spec: ExpertsSpec, hidden: int, dtype: torch.dtype, kept: WeightFormat) -> int:
    inner = spec.intermediate_size
    up = kept.expert_bytes(2 * inner, hidden, dtype)
    return spec.num_experts * (up + kept.expert_bytes(hidden, inner, dtype))


def num_weights(spec: ModelSpec, num_head_rows: int) -> int:
    """For a rank's spec; `num_head_rows` is its part of the head."""
    hidden = spec.hidden_size
    layers = sum(
        sum(mixer.num_weights(hidden) for mixer in layer.mixers)
        + _of_block(layer.feed_forward, hidden)
        + layer.num_norms * hidden
        + (0 if layer.hyper is None else 2 * layer.hyper.num_weights(hidden))
        for layer in spec.all_layers
    )
    if spec.prediction is not None:
        layers += (2 * hidden + 3) * hidden  # the product before the layer, and three norms
    head = 0 if spec.tie_word_embeddings else num_head_rows * hidden
    last = spec.layers[-1].hyper
    end = 0 if last is None else last.num_end_weights(hidden)
    return spec.vocab_size * hidden + layers + hidden + end + head


def _of_block(spec: BlockSpec | None, hidden: int) -> int:
    if spec is None:
        return 0
    if isinstance(spec, SharedSpec):
        gate = 0 if spec.gate is None else hidden
        return _of_block(spec.experts, hidden) + _of_block(spec.shared, hidden) + gate
    inner = spec.intermediate_size
    if isinstance(spec, DenseSpec):
        ups = 1 + spec.is_gated
        return (ups + 1) * hidden * inner + (ups * inner + hidden) * spec.bias
    one = 3 * hidden * inner + (2 * inner + hidden) * spec.bias
    table = 0 if spec.vocab_size is None else spec.vocab_size * spec.experts_per_token
    return table + spec.num_experts * (hidden + spec.bias + spec.has_correction + one)


def check_fits(num_bytes: int, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that are larger than all of the device's memory."""
    most = device_bytes(device)
    if num_bytes > most:
        raise ModelError(
            f"{name} has {num_bytes / 2**30:.1f} GiB of weights as {dtype}, and all "
            f"memory of {device} is {most / 2**30:.1f} GiB. Choose a smaller model, --dtype "
            "bfloat16 or a higher --tensor-parallel-size; or correct the config."
        )


def may_pack(num_bytes: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this size may be stored twice for faster products (`kernels/packed`): if
    the machine gains by it and both take at most an eighth of its memory."""
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
