"""Waiting requests in lanes, one per adapter, in the order of the policy.

A lane that cannot start a request now (its adapter is loading or does not fit, or there is no room)
is skipped as a whole, so a waiting request costs nothing. Every operation is O(log n) for any
number of requests, tenants and adapters. Nothing is kept for a tenant or an adapter without
requests. Deterministic.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from manyroots.ids import AdapterDigest, StepId
from manyroots.scheduler.lanes import Lane, QueueKey
from manyroots.scheduler.policies.protocol import SchedulingPolicy
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request

AGING_STEPS = 64
"""A request that has waited this many steps for its pages keeps others from starting."""


def has_aged(request: Request, step_id: StepId) -> bool:
    return step_id - request.since > AGING_STEPS


class WaitingQueue:
    """Every waiting request."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.lanes: dict[AdapterDigest | None, Lane] = {}
        """Lanes with waiting requests; read-only."""
        self._order: Ranking[Lane] = Ranking()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def head(self) -> Request | None:
        """The request with the lowest key, whether it can start or not."""
        lane = self._order.first()
        return None if lane is None else lane.head

    def first_lanes(self, count: int) -> list[Lane]:
        """The lanes with the lowest keys, whether their requests can start or not."""
        return self._order.first_few(count)

    def keys_of(self, adapters: Iterable[AdapterDigest | None]) -> list[QueueKey]:
        """The key of each adapter's next request."""
        ranks = (self.lanes[adapter].rank for adapter in adapters)
        return [rank for rank in ranks if rank is not None]

    def next_adapters(
        self, count: int, resident: Iterable[AdapterDigest]
    ) -> Iterable[AdapterDigest]:
        """The adapters that are next, at least `count` of them if as many wait."""
        lanes = self.lanes
        on_device = [lanes[digest] for digest in resident if digest in lanes]
        chosen = self.policy.next_adapters(self.first_lanes, count, on_device)
        return [lane.adapter for lane in chosen if lane.adapter is not None]

    def lanes_in_order(self, is_open: dict[AdapterDigest | None, None]) -> Ranking[Lane]:
        """The lanes of some adapters, if requests wait in them; valid until one is pushed."""
        if self.lanes.keys() <= is_open.keys():
            return self._order
        return Ranking(self.lanes[adapter] for adapter in is_open if adapter in self.lanes)

    def next_lane(
        self, order: Ranking[Lane], is_open: Container[AdapterDigest | None]
    ) -> Lane | None:
        """The lane, among these, from which the next request is taken."""
        first = order.first()
        return None if first is None else self.policy.next_lane(first, self.lanes, is_open)

    def requests_of(self, adapter: AdapterDigest) -> list[Request]:
        """All requests that wait for an adapter, in the order of arrival."""
        lane = self.lanes.get(adapter)
        return [] if lane is None else sorted(lane, key=lambda request: request.serial)

    def push(self, request: Request) -> None:
        adapter = request.group[0]
        lane = self.lanes.get(adapter)
        if lane is None:
            lane = self.lanes[adapter] = self.policy.new_lane(adapter)
        self.policy.arrive(request, self._order)
        lane.push(request)
        self._count += 1
        if lane.head is request:
            self._order.note(lane)

    def pop(self, lane: Lane) -> Request:
        """Take the next request of a lane."""
        request = lane.pop()
        self._count -= 1
        if lane.rank is None:
            self._forget(lane)
        return request

    def remove(self, request: Request) -> None:
        """A waiting request is finished."""
        lane = self.lanes[request.group[0]]
        lane.discard(request)
        self._count -= 1
        if lane.rank is None:
            self._forget(lane)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens are computed for a request; a negative number takes earlier ones back."""
        lane = self.policy.charge(request, num_tokens)
        if lane is not None:
            self._order.note(lane)

    def _forget(self, lane: Lane) -> None:
        del self.lanes[lane.adapter]
        self._order.forget(lane)
