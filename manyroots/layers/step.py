"""One step for all layers: prepared once on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from manyroots.kernels.lora_ops.sites import LoraRows


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens whose hidden states are read: those after which a token is sampled."""

    at: Tensor
    """Their indexes among the step's tokens."""
    lora: LoraRows | None
    """The adapter of each."""


@dataclass(slots=True)
class ChosenTokens:
    """What queries chose in the last layer that has an index; later layers may see the same."""

    positions: Tensor | None = None
    """int64 [num_tokens, most], -1 for none; None: all tokens before a query."""


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of a forward pass besides the tokens. Decoding sequences come first."""

    ropes: tuple[Any, ...]
    """The rotation of each token, by the model's kinds of rotation: results of the kernel set's
    `qk_rope_kv_write.look_up`."""
    memories: tuple[Any, ...]
    """By family: results of its memory's `prepare`, which only its kernels read."""
    lora: LoraRows | None
    """The adapter of each token; None if no token has one."""
    before_layer: Callable[[int], None] | None = None
    """Called before each layer, if pages arrive while the step computes."""
    logits_indices: LogitsIndices | None = None
    """None: all tokens."""
    chosen: ChosenTokens = field(default_factory=ChosenTokens)
    tokens: Tensor | None = None
    """The tokens themselves, for blocks whose experts depend on them; the decoder adds them."""
