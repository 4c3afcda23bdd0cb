"""One step as every layer sees it: prepared once, on the device, and read by all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyroots.kernels.lora_ops.sites import LoraRows


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens whose hidden states are read: those after which one is sampled."""

    at: Tensor
    """Their places among the step's tokens."""
    lora: LoraRows | None
    """Which adapter each of them wants."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward pass needs besides the tokens. Decoding sequences come first."""

    ropes: tuple[Any, ...]
    """The rotation of each token, by the model's kinds of rotation: what the kernel set's
    `qk_rope_kv_write.look_up` gave."""
    memories: tuple[Any, ...]
    """By family: what its memory's `prepare` gave. The kernels that read it know what it is."""
    lora: LoraRows | None
    """Which adapter each token wants; None if none wants any."""
    before_layer: Callable[[int], None] | None = None
    """Called before each layer, where pages come in while the step computes."""
    logits_indices: LogitsIndices | None = None
    """None: all tokens."""
