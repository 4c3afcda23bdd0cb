"""Random weights, for measuring speed without a checkpoint.

Takes the destinations of a model's weights and a seed; gives (name, tensor) pairs that are the
same on every run on the same kind of device. Drawn where they will live, so that a model of many
billions of parameters takes seconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from manyroots.layers.weights.fill import Fill

STD = 0.02
"""The usual initialisation; large enough for different logits, small enough that no activation
overflows in half precision."""


def tensors(fills: Mapping[str, Fill], seed: int) -> Iterator[tuple[str, Tensor]]:
    """A tensor for each of `fills`, of its whole shape, on its device: all ranks draw the same."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, fill in fills.items():
        place = fill.place
        if place.device not in generators:
            generators[place.device] = torch.Generator(place.device).manual_seed(seed)
        draw = torch.empty(fill.whole_shape, dtype=fill.source_dtype, device=place.device)
        if not place.is_floating_point():
            yield name, place.clone()  # a table that its layer made
        elif name.endswith("norm.weight"):
            yield name, draw.fill_(1.0 - fill.offset)
        else:
            yield name, draw.normal_(std=STD, generator=generators[place.device])
