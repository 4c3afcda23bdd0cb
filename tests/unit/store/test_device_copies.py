"""States saved and restored within the device, with real tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyroots.ids import CopyId, Tier
from manyroots.step import Copy
from manyroots.store.arena import PageArena
from manyroots.store.device_copies import copy_units, copy_within_device

CPU = torch.device("cpu")


def make_arena(num_units: int = 6) -> PageArena:
    """Each unit is full of its own number, and different in every layer."""
    arena = PageArena(num_units, 4, 3, (2, 4, 2, 8), torch.bfloat16, CPU)
    numbers = torch.arange(num_units).view(-1, 1, 1, 1, 1, 1) * 10
    arena.data += numbers + torch.arange(3).view(1, -1, 1, 1, 1, 1)
    return arena


def units(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def a_copy(
    source: Tier, target: Tier, units_of: tuple[int, int], *, after_model: bool, family: int = 0
) -> Copy:
    first, second = units_of
    return Copy(
        CopyId(1), family, source, target, units(first), units(second), is_after_model=after_model
    )


def test_units_are_copied_whole_and_no_other_is_touched() -> None:
    arena = make_arena()
    before = arena.data.clone()
    copy_units(arena, units(4, 1), units(0, 5))
    assert torch.equal(arena.data[[0, 5]], before[[4, 1]])
    assert torch.equal(arena.data[1:5], before[1:5])
    assert torch.equal(arena.layer(2)[0], before[4, 2]), "views of layers see it, too"


def test_all_units_are_read_before_any_is_written() -> None:
    """Two that change places."""
    arena = make_arena()
    before = arena.data.clone()
    copy_units(arena, units(2, 3), units(3, 2))
    assert torch.equal(arena.data[[3, 2]], before[[2, 3]])


def test_as_many_units_must_come_as_go() -> None:
    with pytest.raises(ValueError, match="2 units are to become 1"):
        copy_units(make_arena(), units(1, 2), units(3))


def test_a_plans_copies_run_before_the_model_or_after_it_in_their_own_family() -> None:
    arenas = [make_arena(), make_arena()]
    before = arenas[0].data.clone()
    device, host = Tier.DEVICE, Tier.HOST
    copies = [
        a_copy(device, device, (1, 2), after_model=False, family=1),
        a_copy(device, device, (2, 3), after_model=False, family=1),
        a_copy(device, device, (4, 5), after_model=True),
        a_copy(host, device, (3, 0), after_model=False),
    ]
    copy_within_device(copies, arenas, after_model=False)
    assert torch.equal(arenas[0].data, before)
    assert torch.equal(arenas[1].data[[2, 3]], before[[1, 1]]), "one after the other"
    copy_within_device(copies, arenas, after_model=True)
    assert torch.equal(arenas[0].data[5], before[4])
    assert torch.equal(arenas[0].data[:5], before[:5])
