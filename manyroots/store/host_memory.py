"""Host memory for adapters: plain, or page-locked so that a GPU copies from it at full speed.

Locking pages takes longer than reading an adapter into them, and whoever asks the system for
memory meanwhile waits for it. `PinnedMemory` therefore has pieces ready before they are asked for,
and makes the next ones in quiet times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Allocate = Callable[[int], Tensor]
"""A number of bytes -> that many, as uint8."""

QUIET_S = 1.0
"""How long nobody must have asked for memory before more is made."""
_SPARE_BYTES = 4 << 30
_MAX_SPARES = 2
"""As many adapters as can come at once without waiting; fewer where that is too much memory."""
_MAX_SHARES = 8
"""Less than a piece divided by this is not cut from one: it would hold all the rest."""
_ALIGNMENT_BYTES = 4096


def pageable(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedMemory:
    """Page-locked memory, cut from pieces of `size` bytes that are made ahead of time.

    What was cut from one piece is free when all of it is.
    """

    def __init__(self, size: int, allocate: Allocate = pinned, *, quiet_s: float = QUIET_S) -> None:
        """`size` is the most that anybody should ask for; more is made when it is."""
        self._size = size
        self._allocate = allocate
        self._quiet_s = quiet_s
        self._num_spares = max(1, min(_MAX_SPARES, _SPARE_BYTES // max(size, 1)))
        self._changed = threading.Condition()
        # All below are guarded by it.
        self._spares: list[Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)
        """What is left of the piece that was last begun."""
        self._quiet_from = time.monotonic()
        self._is_open = True
        threading.Thread(target=self._keep_ready, name="pin", daemon=True).start()

    def __call__(self, num_bytes: int) -> Tensor:
        with self._changed:
            self._quiet_from = time.monotonic() + self._quiet_s
            self._changed.notify_all()
            is_fit = self._size <= num_bytes * _MAX_SHARES and num_bytes <= self._size
            if is_fit and num_bytes > len(self._rest) and self._spares:
                self._rest = self._spares.pop()
            if is_fit and num_bytes <= len(self._rest):
                used = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                taken, self._rest = self._rest[:num_bytes], self._rest[used:]
                return taken
        made = self._allocate(num_bytes)
        with self._changed:
            self._quiet_from = time.monotonic() + self._quiet_s
        return made

    def close(self) -> None:
        """Make no more, and let go of what is ready."""
        with self._changed:
            self._is_open = False
            self._spares.clear()
            self._rest = self._rest[:0].clone()
            self._changed.notify_all()

    def _keep_ready(self) -> None:
        """On a thread of its own."""
        while self._wait_for_need():
            try:
                piece = self._allocate(self._size)
            except RuntimeError as error:
                logger.warning(
                    "no page-locked memory ahead of time, adapters load slower: %s", error
                )
                return
            with self._changed:
                self._spares.append(piece)
                self._changed.notify_all()

    def _wait_for_need(self) -> bool:
        """Sleep until it is time to make a piece; False if there will be no need any more."""
        with self._changed:
            while self._is_open:
                left_s = self._quiet_from - time.monotonic()
                if len(self._spares) >= self._num_spares:
                    self._changed.wait()
                elif left_s > 0:
                    self._changed.wait(left_s)
                else:
                    return True
        return False
