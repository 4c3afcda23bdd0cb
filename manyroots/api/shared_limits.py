"""What keys use, counted by several gateways of one server together.

Memory that the gateways share, made before they are started, and one lock. The kernel releases the
lock of a process that dies. Each gateway counts its own sequences in a place of its own, which its
successor begins with zero, so nothing stays counted for a gateway that is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from manyroots.api.tenants import MAX_KEYS

_VALUE_BYTES = 8
_SPENT, _FILLED_AT, _FIRST = 0, 1, 2
"""Places of a key: two for all gateways, then two of each gateway."""


class SharedLimits:
    """Owns the memory."""

    def __init__(self, num_gateways: int) -> None:
        self.num_gateways = num_gateways
        self.width = _FIRST + 2 * num_gateways
        num_bytes = MAX_KEYS * self.width * _VALUE_BYTES
        self.file = os.memfd_create("manyroots-limits")
        os.ftruncate(self.file, num_bytes)
        self.values = memoryview(mmap.mmap(self.file, num_bytes)).cast("d")

    def of_gateway(self, number: int) -> GatewayLimits:
        """For the process of one gateway: nothing of it runs yet."""
        limits = GatewayLimits(self, number)
        for key in range(MAX_KEYS):
            limits.of_key(key).clear()
        return limits


class GatewayLimits:
    """The counts of all keys, as one gateway changes them."""

    def __init__(self, shared: SharedLimits, number: int) -> None:
        self._shared = shared
        self._number = number

    def of_key(self, key: int) -> SharedCounts:
        """By its place in the keys file."""
        return SharedCounts(self._shared, self._number, key)


class SharedCounts:
    """One key's. Entered, it is this process's alone."""

    def __init__(self, shared: SharedLimits, gateway: int, key: int) -> None:
        self._file = shared.file
        self._values = shared.values
        self._first = key * shared.width
        self._ends = (self._first + _FIRST, self._first + shared.width)
        self._own = self._first + _FIRST + 2 * gateway

    def __enter__(self) -> None:
        # A lock of the process, which an inherited file may have; flock would be the parent's.
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *why: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def clear(self) -> None:
        self._values[self._own] = self._values[self._own + 1] = 0.0

    @property
    def num_running(self) -> int:
        begin, end = self._ends
        return int(sum(self._values[begin:end:2].tolist()))

    @num_running.setter
    def num_running(self, total: int) -> None:
        self._values[self._own] += total - self.num_running

    @property
    def num_held_tokens(self) -> int:
        begin, end = self._ends
        return int(sum(self._values[begin + 1 : end : 2].tolist()))

    @num_held_tokens.setter
    def num_held_tokens(self, total: int) -> None:
        self._values[self._own + 1] += total - self.num_held_tokens

    @property
    def num_spent(self) -> float:
        return self._values[self._first + _SPENT]

    @num_spent.setter
    def num_spent(self, spent: float) -> None:
        self._values[self._first + _SPENT] = spent

    @property
    def filled_at(self) -> float:
        return self._values[self._first + _FILLED_AT]

    @filled_at.setter
    def filled_at(self, at: float) -> None:
        self._values[self._first + _FILLED_AT] = at
