"""Chooses the kernel set of a model on a device, and limits its steps.

Takes a description and a device; gives the device's own kernels, or the references with a warning
if those lack something. Decided at load, before anything is computed.
"""

from __future__ import annotations

import logging
from typing import assert_never

import torch

from manyroots.errors import ConfigError
from manyroots.kernels.choice import Kernels, kernels_for, reference_kernels
from manyroots.kernels.limits import MAX_GRID_SIDE, NUM_COUNTERS
from manyroots.layers.spec import (
    AttentionSpec,
    ChannelDeltaSpec,
    CompressedSpec,
    DeltaSpec,
    LatentSpec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
)
from manyroots.models.spec import ModelSpec

LEAST_HEAD_DIM, MOST_HEAD_DIM = 32, 256
LEAST_STATE_SIDE, MOST_STATE_SIDE = 16, 256
MOST_ROW = 512
"""Numbers of a row that is key and value of compressed attention; they are rotated in pairs."""
EXPERT_SIDE = 8
"""Experts' sides must be multiples of this, so that rows are whole 16-byte loads."""

logger = logging.getLogger(__name__)


def kernel_set(spec: ModelSpec, device: torch.device) -> Kernels:
    """The fastest kernels that support this model there."""
    reason = why_not_triton(spec) if device.type == "cuda" else None
    if reason is None:
        return kernels_for(device)
    logger.warning("no GPU kernels for this model, steps will be very slow: %s", reason)
    return reference_kernels()


def why_not_triton(spec: ModelSpec) -> str | None:
    """The reason that a model cannot use the GPU's kernels; None if it can."""
    for layer in spec.all_layers:
        for mixer in layer.mixers:
            reason = _why_not(mixer)
            if reason is not None:
                return reason
        if layer.experts is not None:
            for size in (spec.hidden_size, layer.experts.intermediate_size):
                if size % EXPERT_SIDE:
                    return f"its experts have a side of {size}, no multiple of {EXPERT_SIDE}"
    return None


def _why_not(mixer: MixerSpec) -> str | None:
    """For one mixer: the sides of heads and states must suit products in registers."""
    match mixer:
        case AttentionSpec():
            dim = mixer.memory.head_dim
            is_fit = _is_side(dim, LEAST_HEAD_DIM, MOST_HEAD_DIM)
            return None if is_fit else f"its heads have {dim} dimensions"
        case DeltaSpec():
            sides = {"key": mixer.key_dim, "value": mixer.value_dim}
        case ChannelDeltaSpec():
            sides = {"head": mixer.head_dim}
        case MambaSpec():
            sides = {"head": mixer.head_dim, "state": mixer.state_dim}
        case CompressedSpec():
            dims = {"heads": mixer.head_dim}
            if mixer.groups is not None and mixer.groups.index is not None:
                dims["index's heads"] = mixer.groups.index.head_dim
            for what, dim in dims.items():
                if dim % 2 or dim > MOST_ROW:
                    return f"its {what} have {dim} dimensions"
            return None
        case ShortConvSpec() | LatentSpec():
            return None
        case _:
            assert_never(mixer)
    for what, size in sides.items():
        if not _is_side(size, LEAST_STATE_SIDE, MOST_STATE_SIDE):
            return f"its {what} dimension in {mixer.name} is {size}"
    return None


def _is_side(size: int, least: int, most: int) -> bool:
    return not size & (size - 1) and least <= size <= most


def check_step(
    spec: ModelSpec, device: torch.device, *, max_num_tokens: int, max_num_rows: int
) -> None:
    """Refuse, before anything is loaded, steps that exceed a launch on a GPU. A grid's second and
    third dimensions end at 65,535, and attending rows are counted by key-value head."""
    if device.type != "cuda":
        return
    if max_num_tokens > MAX_GRID_SIDE:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_tokens}; on a GPU a step has at most "
            f"{MAX_GRID_SIDE} tokens. Lower it."
        )
    kv_heads = max((_kv_heads(mixer) for layer in spec.layers for mixer in layer.mixers), default=0)
    if not kv_heads:
        return
    # An attending row starts its own query blocks, each split into up to four programs.
    most_rows = min(NUM_COUNTERS // kv_heads, MAX_GRID_SIDE // 8)
    if max_num_rows > most_rows:
        raise ConfigError(
            f"--max-num-seqs is {max_num_rows}; with {kv_heads} key-value heads a step "
            f"on a GPU has at most {most_rows} rows. Lower it."
        )


def _kv_heads(mixer: MixerSpec) -> int:
    """Key-value heads by which attending rows are counted; 0 if its rows do not attend."""
    match mixer:
        case AttentionSpec():
            return mixer.memory.kv_heads
        case LatentSpec() | CompressedSpec():
            return 1
        case ShortConvSpec() | DeltaSpec() | ChannelDeltaSpec() | MambaSpec():
            return 0
        case _:
            assert_never(mixer)
