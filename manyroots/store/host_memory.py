"""Host memory for adapters: plain, or page-locked so that a GPU copies from it at full speed.

Making and locking pages takes longer than reading an adapter into them, and the driver launches
nothing while it locks. So it is done a little at a time, and no caller that asks for memory waits
for it: `PinnedMemory` has pieces ready and makes the next ones in quiet times. Where none is left
it gives pages that are not locked, which the code that filled them locks: that is quick by then,
and a GPU copies several times as fast afterwards. What was locked once stays so, and is used again.

What was not locked at once can't be copied at once: see `within_borders`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int], Tensor]
"""A number of bytes -> that many, as uint8."""

QUIET_S = 1.0
"""How long no memory must have been requested before more is made."""
_AHEAD_BYTES = 2 << 30
_MAX_AHEAD = 32
"""So much is ready for adapters that come at once, in at most so many pieces ..."""
_LEAST_AHEAD = 4
_SHARE_OF_MACHINE = 16
"""... but for so many of the largest adapters, where that is a small part of the machine's."""
_MAX_SHARES = 8
"""Less than a piece divided by this is not cut from one: it would hold all the rest."""
_ALIGNMENT_BYTES = 4096
LOCK_BYTES, PAUSE_S = 32 << 20, 0.01
"""Locked at once, at addresses that are multiples of it, and the time to the next. A step that
meets it takes 2 ms longer; 1.7 GB at once held all steps up for 80 ms, and torch's memory of that
size for 1 s (H200)."""
SHORT_PAUSE_S = 0.0005
"""The same where a request waits for the memory."""


def pageable(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def locked(num_bytes: int, device: torch.device) -> Bytes:
    """Page-locked memory. Its pages are there before the driver is asked to lock them, which is
    then quick, and pauses let steps be launched meanwhile. `device`: the one that the process has,
    so that no other is woken; a new thread knows of none."""
    memory = mapped(num_bytes)
    for at in range(0, num_bytes, LOCK_BYTES):
        memory[at : at + LOCK_BYTES : mmap.PAGESIZE] = 0
    lock_filled(memory, device, pause_s=PAUSE_S)
    return memory


def mapped(num_bytes: int) -> Bytes:
    """Memory none of whose pages is there yet, nor locked, from a border on; in large pages, of
    which threads that fill it make few."""
    size = num_bytes + LOCK_BYTES
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    begin = -whole.ctypes.data % LOCK_BYTES
    return whole[begin : begin + num_bytes]


def lock_filled(memory: Bytes, device: torch.device, *, pause_s: float = SHORT_PAUSE_S) -> None:
    """Lock `mapped` memory whose pages are there by now."""
    with torch.cuda.device(device):
        lock_pages(memory, LOCK_BYTES, pause_s=pause_s)


def lock_pages(memory: Bytes, step: int | None = None, *, pause_s: float = 0.0) -> None:
    """So that a GPU copies from and to it by itself; `step` bytes at a time, or all at once. Not
    torch's own page-locked memory, which takes the next power of two and never gives it back."""
    address, runtime = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    step = step or memory.nbytes
    for at in range(0, memory.nbytes, step):
        code = int(runtime.cudaHostRegister(address + at, min(step, memory.nbytes - at), 0))
        if code:
            logger.warning(
                "host memory can't be page-locked (CUDA error %d), copies will be slower", code
            )
            return
        # Before the memory goes: its addresses may come again.
        weakref.finalize(memory, runtime.cudaHostUnregister, address + at).atexit = False
        if pause_s:
            time.sleep(pause_s)


def within_borders(flat: Tensor) -> Sequence[Tensor]:
    """Cut where `locked` began to lock anew. A copy across is refused by the driver."""
    begin, size = flat.data_ptr() % LOCK_BYTES, flat.element_size()
    end = begin + len(flat) * size
    borders = [begin, *range(LOCK_BYTES, end, LOCK_BYTES), end]
    return torch.split(flat, [(after - at) // size for at, after in pairwise(borders)])


@dataclass(slots=True, eq=False)
class _Piece:
    """Locked memory, and how much of it is in use."""

    memory: Bytes
    is_locked: bool = True
    num_used: int = 0
    """Bytes from the first one on."""
    num_cuts: int = 0
    """What was cut from it and is still alive."""

    def cut(self, num_bytes: int) -> Bytes | None:
        """None if it has no more room."""
        if num_bytes > len(self.memory) - self.num_used:
            return None
        cut = self.memory[self.num_used : self.num_used + num_bytes]
        self.num_used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_cuts += 1
        return cut


class PinnedMemory:
    """Page-locked memory, cut from pieces of `size` bytes that are made ahead of time.

    What was cut from one piece is free when all of it is.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[int], Bytes],
        lock: Callable[[Bytes], None] | None = None,
        *,
        quiet_s: float = QUIET_S,
        num_ahead: int | None = None,
    ) -> None:
        """`size` is the most that a caller should ask for; `make` gives locked memory, and `lock`
        locks memory that was filled; None: what was not ready stays as it is. `num_ahead`: pieces
        that are to be ready; None for as many as `pieces_ahead` says."""
        self._size = size
        self._make = make
        self._lock = lock
        self._quiet_s = quiet_s
        self._num_ahead = pieces_ahead(size) if num_ahead is None else num_ahead
        self._freed: deque[_Piece] = deque()
        """Of which a cut has died, one entry for each; filled when the last is released."""
        self._changed = threading.Condition()
        # All below are guarded by it.
        self._spares: list[_Piece] = []
        self._begun: _Piece | None = None
        """What cuts are taken from."""
        self._unlocked: dict[int, _Piece] = {}
        """By address: pieces that are being filled."""
        self._quiet_from = time.monotonic()
        self._is_open = True
        threading.Thread(target=self._keep_ready, name="pin", daemon=True).start()

    def __call__(self, num_bytes: int) -> Tensor:
        """Memory for `lock`, or plain memory, if none is ready; plain memory if it is too much or
        too little for a piece."""
        with self._changed:
            self._quiet_from = time.monotonic() + self._quiet_s
            self._take_back()
            self._changed.notify_all()
            if not self._size <= num_bytes * _MAX_SHARES or num_bytes > self._size:
                return pageable(num_bytes)
            cut = self._cut(num_bytes) or self._cut_unlocked(num_bytes)
            if cut is None:
                return pageable(num_bytes)
            owner, memory = cut
        weakref.finalize(memory, self._freed.append, owner).atexit = False
        return torch.from_numpy(memory)

    def lock(self, filled: Tensor) -> None:
        """Of memory that was given here and is full now: locked, if it was not before. Called by
        the code that filled it, while others may do the same."""
        with self._changed:
            piece = self._unlocked.pop(filled.data_ptr(), None)
        if piece is not None and self._lock is not None:
            self._lock(piece.memory)
            piece.is_locked = True

    def close(self) -> None:
        """Make no more, and let go of what is ready."""
        with self._changed:
            self._is_open = False
            self._spares.clear()
            self._begun = None
            self._changed.notify_all()

    def _cut(self, num_bytes: int) -> tuple[_Piece, Bytes] | None:
        for owner in (self._begun, self._spares[-1] if self._spares else None):
            memory = None if owner is None else owner.cut(num_bytes)
            if owner is None or memory is None:
                continue
            if owner is not self._begun:
                self._begun = self._spares.pop()
            return owner, memory
        return None

    def _cut_unlocked(self, num_bytes: int) -> tuple[_Piece, Bytes] | None:
        """A piece of its own, which is locked when it is full."""
        if self._lock is None or not self._is_open:
            return None
        piece = _Piece(mapped(num_bytes), is_locked=False)
        memory = piece.cut(num_bytes)
        assert memory is not None
        self._unlocked[memory.ctypes.data] = piece
        return piece, memory

    def _take_back(self) -> None:
        """Pieces nothing of which is in use any more are as good as new; those that were not
        locked, or that are too small for others, go."""
        while self._freed:
            piece = self._freed.popleft()
            piece.num_cuts -= 1
            if piece.num_cuts:
                continue
            piece.num_used = 0
            if not piece.is_locked:
                self._unlocked.pop(piece.memory.ctypes.data, None)
            elif len(piece.memory) >= self._size and piece is not self._begun and self._is_open:
                self._spares.append(piece)

    def _keep_ready(self) -> None:
        """On a thread of its own."""
        while self._wait_for_need():
            try:
                piece = _Piece(self._make(self._size))
            except (MemoryError, OSError, RuntimeError) as error:
                logger.warning(
                    "no page-locked memory ahead of time, adapters load slower: %s", error
                )
                return
            with self._changed:
                if self._is_open:
                    self._spares.append(piece)
                self._changed.notify_all()

    def _wait_for_need(self) -> bool:
        """Sleep until it is time to make a piece; False if there will be no need any more."""
        with self._changed:
            while self._is_open:
                self._take_back()
                left_s = self._quiet_from - time.monotonic()
                if len(self._spares) >= self._num_ahead:
                    self._changed.wait()
                elif left_s > 0:
                    self._changed.wait(left_s)
                else:
                    return True
        return False


def pieces_ahead(size: int) -> int:
    """How many pieces of so many bytes are to be ready."""
    size = max(size, 1)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    many = min(_MAX_AHEAD, _AHEAD_BYTES // size)
    few = min(_LEAST_AHEAD, machine // _SHARE_OF_MACHINE // size)
    return max(1, many, few)
