"""Copies within the device: states that a step saves or restores.

Takes a plan's copies and the arenas, by family; changes the arenas. Part of the step: before the
model computes or, for its results, after it. An arena is page-major, so units are rows of one
matrix, and a copy is one gather and one scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from manyroots.ids import Tier
from manyroots.step import Copy, Int32s
from manyroots.store.arena import UnitArena


def is_within_device(copy: Copy) -> bool:
    return copy.source is Tier.DEVICE and copy.target is Tier.DEVICE


def copy_within_device(
    copies: Iterable[Copy], arenas: Sequence[UnitArena], *, after_model: bool
) -> None:
    """A plan's copies before the model, or after it, in order."""
    for copy in copies:
        if is_within_device(copy) and copy.is_after_model == after_model:
            copy_units(arenas[copy.family], copy.source_units, copy.target_units)


def copy_units(arena: UnitArena, source_units: Int32s, target_units: Int32s) -> None:
    """All units at once: reads happen before writes."""
    if len(source_units) != len(target_units):
        raise ValueError(f"{len(source_units)} units are to become {len(target_units)}")
    data = arena.data
    sources = torch.from_numpy(source_units.astype("int64")).to(data.device)
    targets = torch.from_numpy(target_units.astype("int64")).to(data.device)
    data.index_copy_(0, targets, data.index_select(0, sources))
