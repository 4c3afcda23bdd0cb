"""Claims to places: which adapters lack one and for how long, in the order in which they get it.

Of adapters whose requests wait, those whose patience is over; of those whose requests rest, those
that have rested for a while. Whoever has rested for REST_STEPS comes before everybody else, and
has its place back whatever that costs: it is what bounds the pause in a stream.

Knows who waits and who rests; not who must make place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.residency import Residency
from manyroots.scheduler.places import AdapterPlaces
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Rested, Resting
from manyroots.scheduler.swap_costs import SwapCosts

REST_STEPS = 128
"""One that rests has a turn after so many, if no place was free before."""


@dataclass(slots=True)
class PlaceClaim:
    """An adapter that lacks a place and whose time has come. Nobody changes one; a step makes
    dozens, and freezing each would cost most."""

    adapter: AdapterDigest
    due: int
    """The step at which its patience, or its rest, was over."""
    num_requests: int
    """That it would run with: those that rest, or those that wait."""
    rested: Rested | None
    """Its requests that rest, if any."""
    waiting: Request | None
    """The first that waits; None: the claim is of those that rest."""

    @property
    def is_newcomer(self) -> bool:
        """Whether none of its requests has begun."""
        return self.rested is None

    def is_overdue(self, step_id: StepId) -> bool:
        """Whether those that rest have done so for long enough."""
        return self.waiting is None and self.due <= step_id


def _due(claim: PlaceClaim) -> int:
    return claim.due


class Claims:
    """Who claims a place, read anew in every step."""

    def __init__(
        self, adapters: Residency, resting: Resting, places: AdapterPlaces, costs: SwapCosts
    ) -> None:
        self._adapters = adapters
        self._resting = resting
        self._places = places
        self._costs = costs

    def in_order(
        self, waiting: WaitingQueue, loaded: Collection[Request], step_id: StepId
    ) -> list[PlaceClaim]:
        """Who has rested for long; then who is due first."""
        stay_steps = self._costs.stay_steps
        overdue: list[PlaceClaim] = []
        claims: list[PlaceClaim] = []
        for away in self._places.away():
            if step_id - away.since >= stay_steps:
                due, num_requests = away.since + REST_STEPS, len(away.requests)
                claim = PlaceClaim(away.adapter, due, num_requests, away, None)
                (overdue if claim.is_overdue(step_id) else claims).append(claim)
        # Who has just lent its place has it back soon: its line must not take another's for that.
        may_come = {claim.adapter for claim in (*overdue, *claims)}
        for request, due in self.impatient(waiting, loaded, step_id):
            adapter = request.group[0]
            assert adapter is not None
            rested = self._resting.find(adapter)
            if rested is None or adapter in may_come:
                lane = waiting.lanes.get(adapter)
                num_requests = 1 if lane is None else len(lane)
                claims.append(PlaceClaim(adapter, due, num_requests, rested, request))
        return sorted(overdue, key=_due) + sorted(claims, key=_due)

    def impatient(
        self, waiting: WaitingQueue, loaded: Collection[Request], step_id: StepId
    ) -> Iterator[tuple[Request, int]]:
        """Of adapters without a place that have waited beyond their patience, each one's next
        request, and the step at which it was over."""
        num_lanes = len(self._places) + len(self._resting.by_adapter) + 2
        for request in (*loaded, *(lane.head for lane in waiting.first_lanes(num_lanes))):
            adapter = request.group[0]
            if adapter is None or self._places.of(adapter) is not None:
                continue
            due = request.waiting_since + self._costs.patience(adapter, packs=waiting.packs)
            if step_id >= due:
                yield request, due
