"""Host memory for adapters: plain, or page-locked so that a GPU copies from it at full speed.

Allocating and locking pages takes longer than reading an adapter into them, and the driver launches
nothing while it locks. Pages are therefore locked in small steps, and no caller waits for it.
`PinnedMemory` has pieces ready and makes the next ones in quiet times. If none is left, it gives
unlocked pages, which the code that filled them locks. That is fast by then, and a GPU copies
several times as fast afterwards. Locked memory stays locked and is reused.

Memory that was not locked in one step cannot be copied in one step: see `within_borders`.
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
"""Memory is made ahead of time only after no request for this long."""
_AHEAD_BYTES = 2 << 30
_MAX_AHEAD = 32
"""This much is ready for adapters that arrive at once, in at most this many pieces ..."""
_LEAST_AHEAD = 4
_SHARE_OF_MACHINE = 16
"""... or for this many of the largest adapters, if that is a small part of the machine's memory."""
_MAX_SHARES = 8
"""A piece is not cut into parts smaller than its size divided by this: a small part would hold all
the rest."""
_ALIGNMENT_BYTES = 4096
LOCK_BYTES, PAUSE_S = 32 << 20, 0.01
"""Bytes locked at once, at addresses that are multiples of it, and the pause before the next. A
concurrent step takes 2 ms longer. Locking 1.7 GB at once delayed all steps by 80 ms, and torch's
memory of that size by 1 s (H200)."""
SHORT_PAUSE_S = 0.0005
"""The same while a request waits for the memory."""


def pageable(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def locked(num_bytes: int, device: torch.device) -> Bytes:
    """Page-locked memory. Its pages are allocated before they are locked, which makes locking fast,
    and pauses let steps be launched meanwhile. `device`: the process's device, so that no other is
    initialised; a new thread knows of none."""
    memory = mapped(num_bytes)
    for at in range(0, num_bytes, LOCK_BYTES):
        memory[at : at + LOCK_BYTES : mmap.PAGESIZE] = 0
    lock_filled(memory, device, pause_s=PAUSE_S)
    return memory


def mapped(num_bytes: int) -> Bytes:
    """Memory without allocated or locked pages, aligned to a border; in large pages, so that
    threads that fill it allocate few."""
    size = num_bytes + LOCK_BYTES
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    begin = -whole.ctypes.data % LOCK_BYTES
    return whole[begin : begin + num_bytes]


def lock_filled(memory: Bytes, device: torch.device, *, pause_s: float = SHORT_PAUSE_S) -> None:
    """Lock `mapped` memory whose pages are allocated by now."""
    with torch.cuda.device(device):
        lock_pages(memory, LOCK_BYTES, pause_s=pause_s)


def lock_pages(memory: Bytes, step: int | None = None, *, pause_s: float = 0.0) -> None:
    """Lock memory so that a GPU copies from and to it directly; `step` bytes at a time, or all at
    once. Not torch's page-locked memory, which takes the next power of two and never frees it."""
    address, runtime = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    step = step or memory.nbytes
    for at in range(0, memory.nbytes, step):
        code = int(runtime.cudaHostRegister(address + at, min(step, memory.nbytes - at), 0))
        if code:
            logger.warning(
                "host memory can't be page-locked (CUDA error %d), copies will be slower", code
            )
            return
        # Before the memory is freed: its addresses may be reused.
        weakref.finalize(memory, runtime.cudaHostUnregister, address + at).atexit = False
        if pause_s:
            time.sleep(pause_s)


def within_borders(flat: Tensor) -> Sequence[Tensor]:
    """Split at the borders between locking steps: the driver refuses a copy across one."""
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
    """Bytes in use, from the first one on."""
    num_cuts: int = 0
    """Live parts of it."""

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

    A piece is free again when all of its parts are.
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
        """`size` is the most that a caller should request. `make` gives locked memory, and `lock`
        locks filled memory; None: memory that was not ready stays unlocked. `num_ahead`: pieces to
        keep ready; None for the number of `pieces_ahead`."""
        self._size = size
        self._make = make
        self._lock = lock
        self._quiet_s = quiet_s
        self._num_ahead = pieces_ahead(size) if num_ahead is None else num_ahead
        self._freed: deque[_Piece] = deque()
        """Pieces with a freed part, one entry for each; filled when the last reference is
        released."""
        self._changed = threading.Condition()
        # Guards everything below.
        self._spares: list[_Piece] = []
        self._begun: _Piece | None = None
        """The piece that parts are cut from."""
        self._unlocked: dict[int, _Piece] = {}
        """By address: pieces that are being filled."""
        self._quiet_from = time.monotonic()
        self._is_open = True
        threading.Thread(target=self._keep_ready, name="pin", daemon=True).start()

    def __call__(self, num_bytes: int) -> Tensor:
        """Memory to `lock` later, or plain memory, if none is ready; plain memory if the size is
        too large or too small for a piece."""
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
        """Lock memory from here that is full now, unless it is locked. Called by the code that
        filled it, concurrently."""
        with self._changed:
            piece = self._unlocked.pop(filled.data_ptr(), None)
        if piece is not None and self._lock is not None:
            self._lock(piece.memory)
            piece.is_locked = True

    def close(self) -> None:
        """Make no more, and release what is ready."""
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
        """A separate piece, which is locked when it is full."""
        if self._lock is None or not self._is_open:
            return None
        piece = _Piece(mapped(num_bytes), is_locked=False)
        memory = piece.cut(num_bytes)
        assert memory is not None
        self._unlocked[memory.ctypes.data] = piece
        return piece, memory

    def _take_back(self) -> None:
        """Reuse pieces without live parts; free those that were not locked, or are too small for
        others."""
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
        """Runs on a separate thread."""
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
        """Sleep until a piece is needed; False if none will be."""
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
    """The number of pieces of this size to keep ready."""
    size = max(size, 1)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    many = min(_MAX_AHEAD, _AHEAD_BYTES // size)
    few = min(_LEAST_AHEAD, machine // _SHARE_OF_MACHINE // size)
    return max(1, many, few)
