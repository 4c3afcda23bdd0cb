"""First come, first served: requests wait in the order of arrival, and all are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import Importance, Lane, PlainLane
from manyroots.scheduler.policies.protocol import Lanes, Open, SchedulingPolicy
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request


class FcfsPolicy(SchedulingPolicy):
    """Other policies override parts of this one."""

    importance: Importance | None = None
    charges_tokens = False
    patience_steps = 0
    row_patience_steps = 0

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        return PlainLane(adapter, None)

    def next_lane(self, first: Lane, lanes: Lanes, is_open: Open) -> Lane:
        return first

    def next_adapters(
        self, first: Callable[[int], list[Lane]], count: int, resident: Sequence[Lane]
    ) -> Iterable[Lane]:
        return first(count)

    def arrive(self, request: Request, order: Ranking[Lane]) -> None:
        pass

    def charge(self, request: Request, num_tokens: int) -> Lane | None:
        return None

    def num_served_tokens(self, request: Request) -> int:
        return 0

    def close(self, request: Request) -> None:
        pass

    def victim(
        self, candidates: Sequence[Request], cost: Callable[[Request], tuple[int, int]]
    ) -> Request | None:
        return min(candidates, key=cost, default=None)
