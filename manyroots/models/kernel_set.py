"""Which set of kernels computes a model on a device, and what a step may hold there.

Takes a description and a device; gives the device's own kernels, or the references with a warning
where those lack something. Said at load, before anything is computed.
"""

from __future__ import annotations

import logging

import torch

from manyroots.errors import ConfigError
from manyroots.kernels.choice import Kernels, kernels_for, reference_kernels
from manyroots.kernels.limits import MAX_GRID_SIDE, NUM_COUNTERS
from manyroots.layers.spec import DeltaSpec, MambaSpec, MixerSpec
from manyroots.models.spec import ModelSpec

LEAST_HEAD_DIM, MOST_HEAD_DIM = 32, 256
LEAST_STATE_SIDE, MOST_STATE_SIDE = 16, 256
EXPERT_SIDE = 8
"""Experts' sides are multiples of it, so that rows are whole 16-byte loads."""

logger = logging.getLogger(__name__)


def kernel_set(spec: ModelSpec, device: torch.device) -> Kernels:
    """The fastest kernels that compute this model there."""
    reason = why_not_triton(spec) if device.type == "cuda" else None
    if reason is None:
        return kernels_for(device)
    logger.warning("no GPU kernels for this model, steps will be very slow: %s", reason)
    return reference_kernels()


def why_not_triton(spec: ModelSpec) -> str | None:
    """What keeps a model from the GPU's kernels; None if nothing does."""
    for layer in spec.layers:
        if layer.attention is not None:
            dim = layer.attention.memory.head_dim
            if dim & (dim - 1) or not LEAST_HEAD_DIM <= dim <= MOST_HEAD_DIM:
                return f"its heads have {dim} dimensions"
        for mixer in layer.mixers:
            reason = _why_not_recurrent(mixer)
            if reason is not None:
                return reason
        if layer.experts is not None:
            for size in (spec.hidden_size, layer.experts.intermediate_size):
                if size % EXPERT_SIDE:
                    return f"its experts have a side of {size}, no multiple of {EXPERT_SIDE}"
    return None


def _why_not_recurrent(mixer: MixerSpec) -> str | None:
    """Of a mixer with a state: its sides are those of products in registers."""
    if isinstance(mixer, DeltaSpec):
        sides = {"key": mixer.key_dim, "value": mixer.value_dim}
    elif isinstance(mixer, MambaSpec):
        sides = {"head": mixer.head_dim, "state": mixer.state_dim}
    else:
        return None
    for what, size in sides.items():
        if size & (size - 1) or not LEAST_STATE_SIDE <= size <= MOST_STATE_SIDE:
            return f"its {what} dimension in {mixer.name} is {size}"
    return None


def check_step(
    spec: ModelSpec, device: torch.device, *, max_num_tokens: int, max_num_rows: int
) -> None:
    """Refuse, before anything is loaded, steps that no launch on a GPU could hold: a grid's second
    and third sides end at 65,535, and rows that attend are counted by key-value head."""
    if device.type != "cuda":
        return
    if max_num_tokens > MAX_GRID_SIDE:
        raise ConfigError(
            f"--max-num-batched-tokens is {max_num_tokens}; on a GPU a step has at most "
            f"{MAX_GRID_SIDE} tokens. Lower it."
        )
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    if not attentions:
        return
    kv_heads = max(attention.memory.kv_heads for attention in attentions)
    # A row that attends begins query blocks of its own, each cut into up to four programs.
    most_rows = min(NUM_COUNTERS // kv_heads, MAX_GRID_SIDE // 8)
    if max_num_rows > most_rows:
        raise ConfigError(
            f"--max-num-seqs is {max_num_rows}; with {kv_heads} key-value heads a step "
            f"on a GPU has at most {most_rows} rows. Lower it."
        )
