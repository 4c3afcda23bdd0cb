"""Random weights, for measuring speed without a checkpoint.

Takes the destinations of a model's weights and a seed; gives (name, tensor) pairs that are the
same on every run on the same kind of device. Drawn where they will live, so that a model of many
billions of parameters takes seconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

STD = 0.02
"""What such models are initialised with; large enough for logits that differ, small enough that
no activation overflows in half precision."""


def tensors(slots: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """A tensor for each of `slots`, of its shape, dtype and device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, slot in slots.items():
        if slot.device not in generators:
            generators[slot.device] = torch.Generator(slot.device).manual_seed(seed)
        if name.endswith("norm.weight"):
            yield name, torch.ones_like(slot)
        else:
            draw = torch.empty(slot.shape, dtype=slot.dtype, device=slot.device)
            yield name, draw.normal_(std=STD, generator=generators[slot.device])
