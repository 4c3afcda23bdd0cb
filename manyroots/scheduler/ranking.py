"""Things in the order of their ranks: finding the first costs O(log n).

A heap that is corrected when it is read. A rank that has grown is noticed when its entry reaches
the top, so growing costs nothing; code that lowers a rank must call `note`. Deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

Rank = tuple[Any, ...]
"""The smallest comes first. No two things have equal ranks."""

MAX_STALE = 64
"""With this many entries more than twice the things, outdated entries are removed."""


class Ranked(Protocol):
    """A thing that can be ranked."""

    @property
    def rank(self) -> Rank | None:
        """None: it has no rank (any more)."""
        ...


T = TypeVar("T", bound=Ranked)
RankedEntry = tuple[Rank, int, T]
"""A rank that a thing had, and a unique number: things are never compared, and an entry is known
by its number rather than its identity, which a compiler need not keep."""


class Ranking(Generic[T]):
    """Each thing has one valid entry, which is not above its rank."""

    __slots__ = ("_entries", "_few", "_heap", "_next_number", "_num_few")

    def __init__(self, things: Iterable[T] = ()) -> None:
        self._heap: list[RankedEntry[T]] = []
        self._entries: dict[T, RankedEntry[T]] = {}
        """The valid entry of each thing; other entries in the heap are outdated."""
        self._next_number = 0
        self._few: list[RankedEntry[T]] = []
        self._num_few = 0
        """The first things at the last call; none if another may come before them."""
        for thing in things:
            self.note(thing)

    def __len__(self) -> int:
        """The number of stored entries, for tests of removal."""
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """All things, in no order."""
        return iter(self._entries)

    def note(self, thing: T) -> None:
        """A thing is new, or its rank may be lower than before."""
        rank = thing.rank
        assert rank is not None
        known = self._entries.get(thing)
        if known is None or rank < known[0]:
            self._next_number += 1
            entry = self._entries[thing] = (rank, self._next_number, thing)
            heapq.heappush(self._heap, entry)
            self._num_few = 0
            if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
                self._tidy()

    def forget(self, thing: T) -> None:
        """A thing has no rank any more."""
        self._entries.pop(thing, None)
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
            self._tidy()

    def first(self) -> T | None:
        if len(self._entries) == 1:
            (only,) = self._entries
            if only.rank is not None:
                return only  # its entry may be outdated
        return self._top()

    def first_rank(self) -> Rank | None:
        """The rank of the first thing, computed once: every arrival reads it."""
        if not self._heap:
            return None
        rank, number, thing = self._heap[0]
        known = self._entries.get(thing)
        if known is not None and known[1] == number:
            now = thing.rank
            if now == rank or (now is not None and len(self._entries) == 1):
                return now  # the entry of a single thing may be outdated
        return None if self._top() is None else self._heap[0][0]

    def _top(self) -> T | None:
        """The first thing; its entry is valid and on top of the heap."""
        heap, entries = self._heap, self._entries
        while heap:
            rank, number, thing = heap[0]
            known = entries.get(thing)
            counts = known is not None and known[1] == number
            now = thing.rank if counts else None
            if counts and (now is rank or now == rank):
                return thing
            if now is not None:
                self._next_number += 1
                entry = entries[thing] = (now, self._next_number, thing)
                heapq.heapreplace(heap, entry)
                continue
            heapq.heappop(heap)
            if counts:
                del entries[thing]
        return None

    def first_few(self, count: int) -> list[T]:
        """The first `count` things, in order."""
        if count > self._num_few or not all(map(self._is_true, self._few)):
            few: list[RankedEntry[T]] = []
            while len(few) < count and self._top() is not None:
                few.append(heapq.heappop(self._heap))
            for entry in few:
                heapq.heappush(self._heap, entry)
            self._few, self._num_few = few, count
        return [thing for _, _, thing in self._few[:count]]

    def _is_true(self, entry: RankedEntry[T]) -> bool:
        rank, number, thing = entry
        known = self._entries.get(thing)
        if known is None or known[1] != number:
            return False
        now = thing.rank
        return now is rank or now == rank

    def _tidy(self) -> None:
        """Remove outdated entries."""
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
