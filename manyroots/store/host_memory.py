"""Host memory for adapters: plain, or page-locked so that a GPU copies from it at full speed.

Locking pages takes longer than reading an adapter into them. `PinnedMemory` therefore has a piece
ready before it is asked for, and makes the next one in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

Allocate = Callable[[int], Tensor]
"""A number of bytes -> that many, as uint8."""

_MAX_WASTE = 2
"""A piece is handed out for no less than its size divided by this: the rest is held, too."""


def pageable(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedMemory:
    """Page-locked memory, with a piece of `size` bytes ready for whoever comes next."""

    def __init__(self, size: int, allocate: Allocate = pinned) -> None:
        self._size = size
        self._allocate = allocate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pin")
        self._lock = threading.Lock()
        self._spare: Future[Tensor] = self._thread.submit(allocate, size)

    def __call__(self, num_bytes: int) -> Tensor:
        if not self._size // _MAX_WASTE <= num_bytes <= self._size:
            return self._allocate(num_bytes)
        with self._lock:
            spare, self._spare = self._spare, self._thread.submit(self._allocate, self._size)
        return spare.result()[:num_bytes]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
