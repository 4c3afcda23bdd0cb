"""Adapters in host memory: which are there, and which goes when another needs the room.

Whoever owns a device slot has a copy here too, *bound* as long as it owns the slot; so taking a
slot away never costs a copy back. The others are *loose* and go least recently used first, where
a copy's last use is when its adapter left the device.
"""

from __future__ import annotations

from collections.abc import Callable

from manyroots.ids import AdapterDigest


class HostCopies:
    """Bound and loose copies, up to a limit."""

    def __init__(self, limit: int | None, is_precious: Callable[[AdapterDigest], bool]) -> None:
        """`is_precious`: copies that should go last, since they might not be had again."""
        self.limit = limit
        self._is_precious = is_precious
        self.bound: set[AdapterDigest] = set()
        self.loose: dict[AdapterDigest, None] = {}
        """Least recently used first."""

    def __contains__(self, digest: AdapterDigest) -> bool:
        return digest in self.bound or digest in self.loose

    def __len__(self) -> int:
        return len(self.bound) + len(self.loose)

    def make_room(self, count: int) -> list[AdapterDigest]:
        """Drop loose copies until `count` more fit, or none is left. Gives what was dropped."""
        if self.limit is None:
            return []
        num_missing = min(len(self) + count - self.limit, len(self.loose))
        victims: list[AdapterDigest] = []
        for digest in self.loose:
            if len(victims) >= num_missing:
                break
            if not self._is_precious(digest):
                victims.append(digest)
        for digest in self.loose:
            if len(victims) >= num_missing:
                break
            if self._is_precious(digest):
                victims.append(digest)
        for digest in victims:
            del self.loose[digest]
        return victims

    def bind(self, digest: AdapterDigest) -> None:
        """Its adapter gets a device slot; a copy that is not here yet is on its way."""
        self.loose.pop(digest, None)
        self.bound.add(digest)

    def loosen(self, digest: AdapterDigest) -> None:
        """Its adapter has no device slot (any more)."""
        self.bound.discard(digest)
        self.loose[digest] = None

    def drop(self, digest: AdapterDigest) -> bool:
        """Whether there was a copy to drop."""
        was_here = digest in self
        self.bound.discard(digest)
        self.loose.pop(digest, None)
        return was_here
