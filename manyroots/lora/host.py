"""Adapters in host memory: which are there, and which goes when another needs the room.

An adapter with a device slot has a copy here too, *bound* as long as it owns the slot; so taking a
slot away never costs a copy back. One that is *arriving* is on its way from storage and has no slot
yet. The others are *loose* and go least recently used first, where a copy's last use is when its
adapter left the device, or when it arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from manyroots.ids import AdapterDigest


class HostCopies:
    """Bound, arriving and loose copies, up to a limit."""

    def __init__(self, limit: int | None, is_precious: Callable[[AdapterDigest], bool]) -> None:
        """`is_precious`: copies that should go last, since they might not be had again."""
        self.limit = limit
        self._is_precious = is_precious
        self.bound: set[AdapterDigest] = set()
        self.arriving: set[AdapterDigest] = set()
        self.loose: dict[AdapterDigest, None] = {}
        """Least recently used first."""

    def __contains__(self, digest: AdapterDigest) -> bool:
        """Whether it is here; one that is arriving is not yet."""
        return digest in self.bound or digest in self.loose

    def __len__(self) -> int:
        """How much room is taken, by those that are arriving too."""
        return len(self.bound) + len(self.arriving) + len(self.loose)

    def has_room(self, count: int = 1) -> bool:
        return self.limit is None or len(self) + count <= self.limit

    def make_room(
        self, count: int, keep: Collection[AdapterDigest] = frozenset()
    ) -> list[AdapterDigest]:
        """Drop loose copies but those of `keep` until `count` more fit, or none is left. Gives
        what was dropped."""
        if self.has_room(count):
            return []
        assert self.limit is not None
        loose = [digest for digest in self.loose if digest not in keep]
        in_order = sorted(loose, key=self._is_precious)  # stable: least recently used first
        victims = in_order[: len(self) + count - self.limit]
        for digest in victims:
            del self.loose[digest]
        return victims

    def expect(self, digest: AdapterDigest) -> None:
        """A copy is on its way, for which there is room."""
        self.arriving.add(digest)

    def bind(self, digest: AdapterDigest) -> None:
        """Its adapter gets a device slot; a copy that is not here yet is on its way."""
        self.loose.pop(digest, None)
        self.bound.add(digest)

    def loosen(self, digest: AdapterDigest) -> None:
        """A copy is here whose adapter has no device slot (any more)."""
        self.bound.discard(digest)
        self.arriving.discard(digest)
        self.loose[digest] = None

    def drop(self, digest: AdapterDigest) -> bool:
        """Whether there was a copy to drop."""
        was_here = digest in self
        self.bound.discard(digest)
        self.arriving.discard(digest)
        self.loose.pop(digest, None)
        return was_here
