"""Copies between tiers: the bits that went come back, and what fails is said to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from manyroots.ids import Tier
from manyroots.step import CopyDone, KeepStored
from manyroots.store.backends.files import Files
from manyroots.store.batched_copies import runs
from manyroots.store.host_arena import HostArena, rows_of
from manyroots.store.storage_link import MAX_KEEPS, StorageLink, UnitStorage
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


def keyed(family: int = 0) -> dict[bytes, bytes]:
    """Key of a page's unit by its hash."""
    storage = UnitStorage(Shelf(), 1.0)
    return {page: storage.key(page, family) for page in HASHES}


class OrderedShelf(Shelf):
    """Remembers the order of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        self.order.append("put")
        return super().put(items)

    def keep(self, keys: Sequence[bytes], for_s: float) -> None:
        self.order.append("keep")
        super().keep(keys, for_s)


def test_t13_what_is_to_be_kept_is_told_after_it_was_written() -> None:
    """T13: of all families, with the time that is left; 0 ends it."""
    shelf, device = OrderedShelf(), Arena(3)
    hosts = [HostArena(3, device.data), HostArena(3, device.data)]
    copies = TierCopies([device, device], hosts, UnitStorage(shelf, PATIENCE_S))
    shelf.is_open.clear()
    copies.start(copy(1, HOST, STORAGE, [0, 1], [], HASHES[:2]))
    copies.keep_stored(KeepStored(HASHES[0] + HASHES[1], 60.0))
    copies.keep_stored(KeepStored(HASHES[1], 0.0))
    shelf.is_open.set()
    copies.close()
    assert shelf.order == ["put", "keep", "keep"]
    for family in (0, 1):
        keys = keyed(family)
        assert 0 < shelf.kept[keys[HASHES[0]]] <= 60
        assert shelf.kept[keys[HASHES[1]]] == 0
    assert len(shelf.kept) == 4


def test_t13_storage_that_fails_or_hangs_delays_nothing_by_what_it_is_to_keep() -> None:
    """T13, T03: hints are dropped when too many wait or their time is over; writes go on."""
    shelf, device, now = Shelf(), Arena(3), [0.0]
    host = HostArena(3, device.data)
    ends: list[CopyDone] = []
    storage = UnitStorage(shelf, PATIENCE_S)
    link = StorageLink([rows_of(host.data)], storage, ends.append, lambda: now[0])
    shelf.is_open.clear()
    link.keep(KeepStored(HASHES[0], 60.0))
    assert shelf.was_asked.wait(PATIENCE_S)
    for _ in range(2 * MAX_KEEPS):
        link.keep(KeepStored(HASHES[1], 60.0))
    assert (link._num_keeps, link._num_dropped_keeps) == (MAX_KEEPS, MAX_KEEPS + 1)
    now[0] = PATIENCE_S + 1
    shelf.fault = OSError("planted")
    shelf.is_open.set()
    link.forget([])  # waits for all before it
    assert link._num_keeps == 0
    assert link._num_dropped_keeps == 2 * MAX_KEEPS, "all but the one under way"
    assert shelf.kept == {}
    shelf.fault = None
    link.start(copy(1, HOST, STORAGE, [0], [], HASHES[:1]))
    link.keep(KeepStored(HASHES[0], 60.0))
    link.close()
    assert [done.error for done in ends] == [None]
    assert shelf.kept == {keyed()[HASHES[0]]: 60.0}
