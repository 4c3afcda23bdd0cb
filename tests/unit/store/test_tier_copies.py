"""Copies between tiers: the bits that went come back, and what fails is said to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from manyroots.ids import Tier
from manyroots.store.backends.files import Files
from manyroots.store.batched_copies import runs
from manyroots.store.host_arena import HostArena
from manyroots.store.storage_link import UnitStorage
from manyroots.store.tier_copies import TierCopies
from tests.helpers.patience import PATIENCE_S
from tests.unit.store.tiers import Arena, Shelf, copy, end_of

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
HASHES = (b"a" * 32, b"b" * 32, b"c" * 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t01_t06_device_host_files_and_back_is_bit_identical(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """T01, T02, T06: for every dtype, NaNs included, through a second set of tiers."""
    device = Arena(7, dtype)
    before = [device.bits(unit) for unit in range(7)]
    storage = UnitStorage(Files(tmp_path, None), PATIENCE_S)
    first = TierCopies([device], [HostArena(5, device.data)], storage)
    done = end_of(first, copy(1, DEVICE, HOST, [4, 0, 6], [3, 1, 2]))
    assert done[1].arrived.all()
    assert done[1].seconds > 0
    assert end_of(first, copy(2, HOST, STORAGE, [3, 1, 2], [], HASHES))[2].arrived.all()
    first.close()
    other = Arena(7, dtype, seed=9)
    storage = UnitStorage(Files(tmp_path, None), PATIENCE_S)
    second = TierCopies([other], [HostArena(4, other.data)], storage)
    assert end_of(second, copy(3, STORAGE, HOST, [], [0, 3, 1], HASHES))[3].arrived.all()
    assert end_of(second, copy(4, HOST, DEVICE, [0, 3, 1], [5, 6, 0]))[4].arrived.all()
    second.close()
    assert [other.bits(unit) for unit in (5, 6, 0)] == [before[unit] for unit in (4, 0, 6)]
    untouched = Arena(7, dtype, seed=9)
    assert [other.bits(u) for u in (1, 2, 3, 4)] == [untouched.bits(u) for u in (1, 2, 3, 4)]


def test_families_and_ranks_have_keys_of_their_own() -> None:
    """T02: the same page's hash, of two families or two ranks, is two values."""
    shelf = Shelf()
    keys = {
        UnitStorage(shelf, 1.0, rank, num_ranks).key(HASHES[0], family)
        for family in range(3)
        for rank, num_ranks in ((0, 1), (0, 2), (1, 2), (0, 3))
    }
    assert len(keys) == 12


def test_units_behind_each_other_are_one_copy() -> None:
    sources = np.array([3, 4, 5, 9, 8, 1], np.int32)
    targets = np.array([0, 1, 2, 3, 4, 5], np.int32)
    assert list(runs(sources, targets)) == [(3, 0, 3), (9, 3, 1), (8, 4, 1), (1, 5, 1)]
    assert list(runs(sources[:0], targets[:0])) == []
    with pytest.raises(ValueError, match="6 units are to become 5"):
        list(runs(sources, targets[:5]))


def test_t03_what_storage_does_not_have_whole_is_missing_and_removed() -> None:
    """T03: one value is whole, others are damaged, another's, cut short, or were never there."""
    shelf, host = Shelf(), HostArena(6, Arena(1).data)
    host.data.copy_(Arena(6, seed=3).data)
    copies = TierCopies([Arena(6)], [host], UnitStorage(shelf, PATIENCE_S))
    hashes = tuple(bytes([i]) * 32 for i in range(5))
    end_of(copies, copy(1, HOST, STORAGE, [0, 1, 2, 3], [], hashes[:4]))
    keys = list(shelf.values)
    damaged = bytearray(shelf.values[keys[1]])
    damaged[77] ^= 1
    shelf.values[keys[1]] = bytes(damaged)
    shelf.values[keys[2]] = shelf.values[keys[0]]
    shelf.values[keys[3]] = shelf.values[keys[3]][:-1]
    done = end_of(copies, copy(2, STORAGE, HOST, [], [5, 1, 2, 3, 4], hashes))[2]
    copies.close()
    assert done.arrived.tolist() == [True, False, False, False, False]
    assert done.error is None
    assert list(shelf.values) == keys[:1]
    assert host.data[5].equal(host.data[0])


def test_t03_storage_that_fails_says_why_and_touches_no_unit() -> None:
    """T03: reading and writing, each reported once."""
    shelf, host = Shelf(), HostArena(3, Arena(1).data)
    before = host.data.clone()
    copies = TierCopies([Arena(3)], [host], UnitStorage(shelf, PATIENCE_S))
    shelf.fault = OSError("the disk is on fire")
    done = end_of(
        copies,
        copy(1, STORAGE, HOST, [], [0, 1, 2], HASHES),
        copy(2, HOST, STORAGE, [0], [], HASHES[:1]),
    )
    copies.close()
    for number in (1, 2):
        assert not done[number].arrived.any()
        assert "the disk is on fire" in (done[number].error or "")
    assert host.data.equal(before)


def test_t03_t12_what_storage_refuses_is_not_reported_as_written() -> None:
    """T03, T12: storage is full after one value; what it has already counts as written."""
    shelf, host = Shelf(), HostArena(3, Arena(1).data)
    copies = TierCopies([Arena(3)], [host], UnitStorage(shelf, PATIENCE_S))
    end_of(copies, copy(1, HOST, STORAGE, [1], [], HASHES[1:2]))

    def put(items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        shelf.values.update(items[:1])
        return [True] + [False] * (len(items) - 1)

    with mock.patch.object(shelf, "put", put):
        done = end_of(copies, copy(2, HOST, STORAGE, [0, 1, 2], [], HASHES))[2]
    copies.close()
    assert (done.arrived.tolist(), done.error) == ([True, True, False], None)


def test_t03_storage_that_does_not_answer_is_given_up_and_comes_too_late() -> None:
    """T03, T04: the answer to a copy that was given up changes nothing."""
    shelf, host = Shelf(), HostArena(3, Arena(1).data)
    host.data.copy_(Arena(3, seed=5).data)
    copies = TierCopies([Arena(3)], [host], UnitStorage(shelf, 5.0))
    clock = mock.Mock(return_value=100.0)
    copies._storage._clock = clock  # type: ignore[union-attr]
    assert end_of(copies, copy(1, HOST, STORAGE, [0], [], HASHES[:1]))[1].error is None
    for event in (shelf.is_open, shelf.was_asked, shelf.has_answered):
        event.clear()
    copies.start(copy(2, STORAGE, HOST, [], [2], HASHES[:1]))
    assert shelf.was_asked.wait(PATIENCE_S)
    clock.return_value = 104.9
    assert copies.finished() == ()
    clock.return_value = 105.1
    [done] = copies.finished()
    assert "no answer in 5 s" in (done.error or "")
    host.data[2] = 7.0  # the unit has another owner now
    assert not shelf.has_answered.is_set()
    shelf.is_open.set()
    assert shelf.has_answered.wait(PATIENCE_S)
    copies.close()  # waits for the reading thread
    assert (host.data[2] == 7.0).all()
    assert copies.finished() == ()


def test_what_is_stored_already_is_not_written_again() -> None:
    shelf, host = Shelf(), HostArena(2, Arena(1).data)
    copies = TierCopies([Arena(2)], [host], UnitStorage(shelf, PATIENCE_S))
    end_of(copies, copy(1, HOST, STORAGE, [0], [], HASHES[:1]))
    first = dict(shelf.values)
    assert end_of(copies, copy(2, HOST, STORAGE, [0, 1], [], HASHES[:2]))[2].arrived.all()
    copies.close()
    assert len(shelf.values) == 2
    assert first.items() <= shelf.values.items()
