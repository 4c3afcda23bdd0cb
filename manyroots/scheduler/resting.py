"""Requests that rest: their adapter has lent its place to another for a few steps, or they alone
have lent their rows.

They keep their pages and how far they are. Their seats and rows they give up, since whoever runs
instead needs both; they come back as arrivals, on any row and with their adapter in any slot, so
that a runner knows nothing of resting. Knows who rests and since when, not who should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from manyroots.ids import AdapterDigest, StepId
from manyroots.scheduler.request import Request


class Rested:
    """Requests of one adapter."""

    __slots__ = ("adapter", "place", "requests", "since")

    def __init__(self, adapter: AdapterDigest, since: StepId, place: int) -> None:
        self.adapter = adapter
        self.since = since
        self.place = place
        """The number of the one that they lent; of the one that they have, once they are back and
        wait for tokens alone."""
        self.requests: dict[Request, StepId] = {}
        """And since when each of them rests: one that had lent its row before, for longer."""


class Resting:
    """All that rest, by adapter."""

    def __init__(self) -> None:
        self.by_adapter: dict[AdapterDigest, Rested] = {}
        """Who has rested longest comes first."""
        self.loans: dict[Request, StepId] = {}
        """Who has lent its row alone, and since when, while its adapter keeps its place. Who has
        rested longest comes first."""
        self.total_rests = 0
        """Requests that were put to rest, each as often as it was."""
        self.num_pauses: Counter[AdapterDigest] = Counter()
        """How often each adapter lent its place, since it was last loaded."""

    def __len__(self) -> int:
        return len(self.loans) + sum(len(rested.requests) for rested in self.by_adapter.values())

    def __bool__(self) -> bool:
        """False, nearly always: ask that before anything."""
        return bool(self.by_adapter or self.loans)

    def __iter__(self) -> Iterator[Request]:
        for rested in self.by_adapter.values():
            yield from rested.requests
        yield from self.loans

    def requests_of(self, adapter: AdapterDigest) -> list[Request]:
        """All of an adapter's that rest."""
        rested = self.by_adapter.get(adapter)
        lent = [request for request in self.loans if request.group[0] == adapter]
        return lent if rested is None else [*rested.requests, *lent]

    def groups(self) -> list[Rested]:
        return list(self.by_adapter.values())

    def find(self, adapter: AdapterDigest) -> Rested | None:
        return self.by_adapter.get(adapter)

    def add(
        self, adapter: AdapterDigest, requests: list[Request], since: StepId, place: int
    ) -> None:
        """An adapter gives up its place. Those of it that had not come back yet rest on. Those that
        had lent their rows go on first when it is back, in the stead of as many that ran."""
        rested = Rested(adapter, since, place)
        earlier = self.by_adapter.pop(adapter, None)
        lent = [request for request in self.loans if request.group[0] == adapter][: len(requests)]
        rested.requests = {request: self.loans.pop(request) for request in lent}
        rested.requests |= dict.fromkeys(requests[len(lent) :], since)
        rested.requests |= {} if earlier is None else earlier.requests
        self.by_adapter[adapter] = rested
        self.loans |= dict.fromkeys(requests[: len(lent)], since)
        self.total_rests += len(requests)
        self.num_pauses[adapter] += 1

    def lend(self, request: Request, since: StepId) -> None:
        """A request gives up its row alone."""
        self.loans[request] = since
        self.total_rests += 1

    def remove(self, request: Request) -> None:
        """A request rests no more."""
        if self.loans.pop(request, None) is not None:
            return
        rested = self._of(request)
        del rested.requests[request]
        if not rested.requests:
            del self.by_adapter[rested.adapter]

    def _of(self, request: Request) -> Rested:
        adapter, _ = request.group
        assert adapter is not None
        return self.by_adapter[adapter]
