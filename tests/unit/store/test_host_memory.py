"""Memory for adapters is ready before it is asked for, made in quiet times, and seldom wasted."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from manyroots.store.host_memory import PinnedMemory, pageable
from tests.patience import PATIENCE_S

PIECE = 64 * 4096
LONG_S, SHORT_S = 600.0, 0.05


class Counted:
    """Plain memory in place of page-locked memory, with a list of what was asked for and when."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.times: list[float] = []
        self._made = threading.Semaphore(0)

    def __call__(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        self.times.append(time.monotonic())
        self._made.release()
        return pageable(num_bytes)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._made.acquire(timeout=PATIENCE_S)


def ready(made: Counted, memory: PinnedMemory, count: int) -> None:
    """Until `count` pieces were made and can be taken."""
    made.wait_for(count)
    deadline = time.monotonic() + PATIENCE_S
    while len(memory._spares) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def test_two_adapters_that_come_at_once_find_their_memory_ready() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S)
    ready(made, memory, 2)
    first, second = memory(PIECE - 5), memory(PIECE)
    assert made.sizes == [PIECE, PIECE]
    assert (first.numel(), second.numel(), second.dtype) == (PIECE - 5, PIECE, torch.uint8)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    memory.close()


def test_more_is_made_when_nobody_has_asked_for_a_while() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=SHORT_S)
    ready(made, memory, 2)
    asked = time.monotonic()
    memory(PIECE)
    made.wait_for(1)
    assert made.sizes == [PIECE] * 3
    assert made.times[-1] >= asked + SHORT_S
    memory.close()


def test_small_adapters_share_a_piece_and_none_overlaps() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S)
    ready(made, memory, 2)
    taken = [memory(PIECE // 4 - 1) for _ in range(4)]
    assert len({piece.untyped_storage().data_ptr() for piece in taken}) == 1
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(taken))
    assert made.sizes == [PIECE, PIECE]
    memory.close()


@pytest.mark.parametrize("size", [1, PIECE // 8 - 1, PIECE + 1])
def test_what_is_far_smaller_or_larger_than_a_piece_is_made_as_asked(size: int) -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S)
    ready(made, memory, 2)
    assert memory(size).untyped_storage().nbytes() == size
    memory.close()


def test_when_nothing_is_ready_it_is_made_as_asked() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=LONG_S)
    ready(made, memory, 2)
    assert [memory(PIECE).numel() for _ in range(3)] == [PIECE] * 3
    assert made.sizes == [PIECE] * 3
    memory.close()


def test_nothing_is_made_or_held_after_the_end() -> None:
    made = Counted()
    memory = PinnedMemory(PIECE, made, quiet_s=0.0)
    ready(made, memory, 2)
    memory.close()
    assert memory(PIECE).numel() == PIECE
    time.sleep(SHORT_S)
    assert made.sizes == [PIECE] * 3


def test_without_memory_ahead_of_time_everyone_asks_for_himself() -> None:
    def refuse_pieces(num_bytes: int) -> Tensor:
        if num_bytes == PIECE:
            raise RuntimeError("out of page-locked memory")
        return pageable(num_bytes)

    memory = PinnedMemory(PIECE, refuse_pieces, quiet_s=0.0)
    assert memory(PIECE - 1).untyped_storage().nbytes() == PIECE - 1
    memory.close()
