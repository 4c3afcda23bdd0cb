"""Waiting requests of one adapter, in the order in which they are taken.

A policy makes the lanes (`policies/`): a plain lane is one line, by the policy's key and arrival.
Knows no other lane and no other adapter.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from manyroots.ids import AdapterDigest
from manyroots.scheduler.ranking import MAX_STALE
from manyroots.scheduler.request import Request

QueueKey = tuple[int, int, Request]
"""The policy's key, the order of arrival, and the request itself."""
GroupKey = tuple[AdapterDigest | None, str | None]
"""Adapter and tenant."""
Importance = Callable[[Request], int]
"""The first sort key of a request, before its arrival; smaller is sooner."""


class Line:
    """Requests by key, and by arrival where keys are equal."""

    __slots__ = ("_gone", "_importance", "_late", "_line", "rank")

    def __init__(self, importance: Importance | None = None) -> None:
        self._importance = importance
        self._line: deque[QueueKey] = deque()
        """Requests that arrived after all others in line: nearly all."""
        self._late: list[QueueKey] = []
        """A heap of the others, which returned or are more important."""
        self._gone: set[Request] = set()
        """Removed requests among those; never the head."""
        self.rank: QueueKey | None = None
        """The key of the next request; None if there is none. Cached, because it is read more often
        than it changes."""

    def __len__(self) -> int:
        """The number of stored entries, for tests of removal."""
        return len(self._line) + len(self._late)

    def push(self, request: Request) -> None:
        importance = 0 if self._importance is None else self._importance(request)
        place = (importance, request.serial, request)
        if not self._line or place > self._line[-1]:
            self._line.append(place)
        else:
            heapq.heappush(self._late, place)
        if self.rank is None or place < self.rank:
            self.rank = place

    def discard(self, request: Request) -> None:
        """A finished request will not be pushed again."""
        if self.rank is not None and self.rank[2] is request:
            self.pop()
        else:
            self._gone.add(request)
        if 2 * len(self._gone) > len(self) + MAX_STALE:
            gone, self._gone = self._gone, set()
            self._line = deque(place for place in self._line if place[2] not in gone)
            self._late = sorted(place for place in self._late if place[2] not in gone)

    def pop(self) -> Request:
        place, line, late, gone = self.rank, self._line, self._late, self._gone
        assert place is not None
        request = place[2]
        if not late and not gone:  # nearly always
            line.popleft()
            self.rank = line[0] if line else None
            return request
        while place is not None:
            if late and late[0][1] == place[1]:
                heapq.heappop(late)
            else:
                line.popleft()
            place = line[0] if line else None
            if late and (place is None or late[0] < place):
                place = late[0]
            if not gone or place is None or place[2] not in gone:
                break
            gone.discard(place[2])
        self.rank = place
        return request

    def __iter__(self) -> Iterator[Request]:
        for _, _, request in (*self._line, *self._late):
            if request not in self._gone:
                yield request


class Lane(ABC):
    """Waiting requests of one adapter, or of the base model."""

    __slots__ = ()

    adapter: AdapterDigest | None

    @property
    @abstractmethod
    def rank(self) -> QueueKey | None:
        """The key of the next request; None if there is none."""

    @property
    def head(self) -> Request:
        """The next request; there is at least one."""
        place = self.rank
        assert place is not None
        return place[2]

    @abstractmethod
    def __len__(self) -> int:
        """The number of waiting requests; may count a few removed ones."""

    @abstractmethod
    def push(self, request: Request) -> None: ...

    @abstractmethod
    def pop(self) -> Request: ...

    @abstractmethod
    def discard(self, request: Request) -> None: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class PlainLane(Line, Lane):
    """One line for all tenants."""

    __slots__ = ("adapter",)

    def __init__(self, adapter: AdapterDigest | None, importance: Importance | None) -> None:
        super().__init__(importance)
        self.adapter = adapter
