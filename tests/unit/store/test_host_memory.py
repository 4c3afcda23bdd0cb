"""Memory for adapters is ready before it is asked for, and never much larger than asked."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from manyroots.store.host_memory import PinnedMemory, pageable


class Counted:
    """Plain memory in place of page-locked memory, with a list of what was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.made = threading.Semaphore(0)

    def __call__(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        self.made.release()
        return pageable(num_bytes)


def test_a_piece_is_ready_before_it_is_asked_for_and_another_follows() -> None:
    made = Counted()
    memory = PinnedMemory(100, made)
    assert made.made.acquire(timeout=10)
    first = memory(80)
    assert made.made.acquire(timeout=10)
    assert made.sizes == [100, 100]
    second = memory(100)
    assert (first.numel(), second.numel(), second.dtype) == (80, 100, torch.uint8)
    assert first.data_ptr() != second.data_ptr()
    memory.close()


def test_sizes_that_do_not_fit_the_piece_are_made_as_asked() -> None:
    made = Counted()
    memory = PinnedMemory(100, made)
    assert made.made.acquire(timeout=10)
    assert [memory(size).untyped_storage().nbytes() for size in (49, 101)] == [49, 101]
    assert memory(50).untyped_storage().nbytes() == 100
    memory.close()
