"""Memory for adapters is ready before it is asked for, made in quiet times, and used again."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.store.host_memory import Bytes, PinnedMemory, pieces_ahead, within_borders
from tests.helpers.patience import PATIENCE_S

PIECE = 64 * 4096
LONG_S, SHORT_S = 600.0, 0.05


class Counted:
    """Plain memory in place of page-locked memory, with a list of what was made and when."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.times: list[float] = []
        self._made = threading.Semaphore(0)

    def __call__(self, num_bytes: int) -> Bytes:
        memory = np.zeros(num_bytes, np.uint8)
        self.pieces.append((memory.ctypes.data, memory.ctypes.data + num_bytes))
        self.times.append(time.monotonic())
        self._made.release()
        return memory

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._made.acquire(timeout=PATIENCE_S)

    def owner_of(self, taken: Tensor) -> int | None:
        """Which piece it was cut from; None for plain memory."""
        at = taken.data_ptr()
        found = [i for i, (begin, end) in enumerate(self.pieces) if begin <= at < end]
        return found[0] if found else None


def ready(made: Counted, memory: PinnedMemory, count: int) -> None:
    """Until `count` pieces were made and can be taken."""
    made.wait_for(count)
    deadline = time.monotonic() + PATIENCE_S
    while len(memory._spares) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def test_adapters_that_come_at_once_find_their_memory_ready() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S, num_ahead=3)
    ready(made, memory, 3)
    taken = [memory(PIECE - 5), memory(PIECE), memory(PIECE)]
    assert [one.numel() for one in taken] == [PIECE - 5, PIECE, PIECE]
    assert {made.owner_of(one) for one in taken} == {0, 1, 2}
    assert taken[0].dtype == torch.uint8
    memory.close()


def test_nobody_waits_where_none_is_ready() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S, num_ahead=1)
    ready(made, memory, 1)
    first, second = memory(PIECE), memory(PIECE)
    assert (made.owner_of(first), made.owner_of(second)) == (0, None)
    assert second.numel() == PIECE
    assert len(made.pieces) == 1
    memory.close()


def test_what_was_not_ready_is_locked_when_it_is_full_and_used_again() -> None:
    """A burst of adapters: the last ones are read into new pages, and copied as fast as others."""
    made, locked = Counted(), list[tuple[int, int]]()

    def lock(filled: Bytes) -> None:
        assert (filled == 7).all()
        locked.append((filled.ctypes.data, len(filled)))

    memory = PinnedMemory(PIECE, made, lock, quiet_s=LONG_S, num_ahead=1)
    ready(made, memory, 1)
    first, second, small = memory(PIECE), memory(PIECE), memory(PIECE // 2)
    for taken in (first, second, small):
        taken.fill_(7)
        memory.lock(taken)
        memory.lock(taken)
    at = second.data_ptr()
    assert locked == [(at, PIECE), (small.data_ptr(), PIECE // 2)]
    del taken, second, small
    third = memory(PIECE)
    assert (third.data_ptr(), len(memory._spares)) == (at, 0), "the small one is not used again"
    memory.lock(third)
    assert len(locked) == 2
    memory.close()


def test_what_nobody_filled_is_not_given_to_others() -> None:
    """A file that can't be read leaves its memory unlocked."""
    made, locked = Counted(), list[int]()
    memory = PinnedMemory(
        PIECE, made, lambda filled: locked.append(len(filled)), quiet_s=LONG_S, num_ahead=1
    )
    ready(made, memory, 1)
    taken, failed = memory(PIECE), memory(PIECE)
    del failed
    assert memory(1).numel() == 1
    assert not memory._spares
    assert not memory._unlocked
    other = memory(PIECE)
    assert (made.owner_of(taken), made.owner_of(other)) == (0, None)
    memory.lock(other)
    assert locked == [PIECE], "what comes next is locked when it is full"
    assert not memory._unlocked
    memory.close()


def test_what_nobody_has_any_more_is_used_again() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S, num_ahead=2)
    ready(made, memory, 2)
    for _ in range(3):
        taken = [memory(PIECE), memory(PIECE)]
        assert {made.owner_of(one) for one in taken} == {0, 1}
        view = taken[0][:8].view(torch.float32)
        del taken
        assert made.owner_of(memory(PIECE)) != made.owner_of(view)  # a view is an owner, too
        del view
    assert len(made.pieces) == 2
    memory.close()


def test_more_is_made_when_nobody_has_asked_for_a_while() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=SHORT_S, num_ahead=2)
    ready(made, memory, 2)
    asked = time.monotonic()
    taken = memory(PIECE)
    made.wait_for(1)
    assert len(made.pieces) == 3
    assert made.times[-1] >= asked + SHORT_S
    assert taken.numel() == PIECE
    memory.close()


def test_small_adapters_share_a_piece_and_none_overlaps() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S, num_ahead=2)
    ready(made, memory, 2)
    taken = [memory(PIECE // 4 - 1) for _ in range(4)]
    assert len({made.owner_of(piece) for piece in taken}) == 1
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(taken))
    del taken[0], piece
    others = [memory(PIECE) for _ in range(3)]  # the last of them is plain
    for other in others:
        other.fill_(9)
    assert all((piece == number).all() for number, piece in enumerate(taken, 1))
    memory.close()


@pytest.mark.parametrize("size", [1, PIECE // 8 - 1, PIECE + 1])
def test_what_is_far_smaller_or_larger_than_a_piece_is_plain(size: int) -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S, num_ahead=1)
    ready(made, memory, 1)
    taken = memory(size)
    assert (taken.numel(), made.owner_of(taken)) == (size, None)
    memory.close()


def test_nothing_is_made_or_held_after_the_end() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=0.0, num_ahead=2)
    ready(made, memory, 2)
    memory.close()
    assert memory(PIECE).numel() == PIECE
    time.sleep(SHORT_S)
    assert len(made.pieces) == 2
    assert not memory._spares


def test_without_locked_memory_everyone_gets_plain_memory() -> None:
    def refuse(num_bytes: int) -> Bytes:
        raise MemoryError(f"no {num_bytes} bytes")

    memory = PinnedMemory(PIECE, refuse, quiet_s=0.0)
    assert memory(PIECE - 1).numel() == PIECE - 1
    memory.close()


def test_several_of_the_largest_and_many_small_ones_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1 << (25 if "PHYS" in name else 12))
    assert pieces_ahead(1_660_000_000) == 4
    assert pieces_ahead(87_000_000) == 24
    assert pieces_ahead(1_000_000) == 32
    assert pieces_ahead(10**12) == 1


def test_nothing_is_copied_across_what_was_locked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyroots.store.host_memory.LOCK_BYTES", 4096)
    flat = torch.arange(20_000, dtype=torch.int16)
    for first, last in ((0, 20_000), (7, 9), (2048, 2049), (3000, 19_999)):
        pieces = within_borders(flat[first:last])
        assert torch.equal(torch.cat(list(pieces)), flat[first:last])
        for piece in pieces:
            begin = piece.data_ptr()
            assert begin // 4096 == (begin + 2 * max(len(piece), 1) - 1) // 4096
