"""Who is next: waiting requests in lanes, one per adapter, in the order of the policy.

A lane that can't begin now (its adapter is loading, the cap is reached, there is no room) is passed
over as a whole, so that a waiting request costs nothing while it waits. What is asked here costs
O(log n), however many requests, tenants and adapters wait, and nothing is kept of a tenant or an
adapter that has no requests. Deterministic.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from manyroots.config import Policy
from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import (
    Accounts,
    FairLane,
    Importance,
    Lane,
    PlainLane,
    begun_first,
    priority_of,
)
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request

IMPORTANCE: dict[Policy, Importance] = {Policy.PRIORITY: priority_of, Policy.PACK: begun_first}
"""What counts before arrival, in the policies that have such a thing."""


class WaitingQueue:
    """Every waiting request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.packs = policy is Policy.PACK
        """Whether an adapter's requests are taken together, and one that is on the device is kept
        while requests wait for it."""
        self._group: AdapterDigest | None = None
        """Where packing, the adapter whose requests are taken together now."""
        self._group_end = self._newest = 0
        """The last request of that group, and the last that has arrived, by their serials."""
        self.lanes: dict[AdapterDigest | None, Lane] = {}
        """Those in which someone waits; to be read only."""
        self._order: Ranking[Lane] = Ranking()
        self._count = 0
        self.accounts = Accounts() if policy is Policy.FAIR else None
        """What tenants were served, where that counts."""

    def __len__(self) -> int:
        return self._count

    def first_lanes(self, count: int) -> list[Lane]:
        """Those whose requests are next, first of all, whether they can begin or not."""
        return self._order.first_few(count)

    def lanes_in_order(self, is_open: Iterable[AdapterDigest | None]) -> Ranking[Lane]:
        """Those of some adapters, as far as anybody waits in them."""
        return Ranking(self.lanes[adapter] for adapter in is_open if adapter in self.lanes)

    def next_lane(
        self, order: Ranking[Lane], is_open: Container[AdapterDigest | None]
    ) -> Lane | None:
        """Of such lanes, those that are open, the one that the next request is taken from."""
        first = order.first()
        place = None if first is None else first.rank
        if not self.packs or place is None or place[0] < 0:
            return first  # where packing, maybe one that was retracted
        lane = self.lanes.get(self._group) if self._group in is_open else None
        if lane is not None and lane.head.serial <= self._group_end:
            return lane
        # What waits for the adapter now is a group; who comes later is of its next one. So the
        # oldest request's adapter is next in the end, however many arrive for the others.
        assert first is not None
        self._group, self._group_end = first.adapter, self._newest
        return first

    def requests_of(self, adapter: AdapterDigest) -> list[Request]:
        """All that wait for an adapter, in the order of arrival."""
        lane = self.lanes.get(adapter)
        return [] if lane is None else sorted(lane, key=lambda request: request.serial)

    def push(self, request: Request) -> None:
        adapter = request.group[0]
        lane = self.lanes.get(adapter)
        if lane is None:
            lane = self.lanes[adapter] = self._new_lane(adapter)
        if self.accounts is not None:
            first = self._order.first()
            self.accounts.arrive(request, None if first is None else first.rank)
        lane.push(request)
        self._newest = max(self._newest, request.serial)
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
        """A waiting request is over."""
        lane = self.lanes[request.group[0]]
        lane.discard(request)
        self._count -= 1
        if lane.rank is None:
            self._forget(lane)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Tokens are computed for a request; less than none: they were not after all."""
        account = None if self.accounts is None else self.accounts.charge(request.group, num_tokens)
        if account is not None and num_tokens < 0:
            lane = self.lanes.get(request.group[0])
            if isinstance(lane, FairLane):
                lane.note(account)
                self._order.note(lane)

    def close(self, request: Request) -> None:
        """A request that does not wait is over."""
        if self.accounts is not None:
            self.accounts.close(request)

    def _new_lane(self, adapter: AdapterDigest | None) -> Lane:
        if self.accounts is not None:
            return FairLane(adapter, self.accounts)
        return PlainLane(adapter, IMPORTANCE.get(self._policy))

    def _forget(self, lane: Lane) -> None:
        del self.lanes[lane.adapter]
        self._order.forget(lane)
