"""By priority: a lower number starts first and is preempted last; equals keep the order of
arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import Lane, PlainLane
from manyroots.scheduler.policies.fcfs import FcfsPolicy
from manyroots.scheduler.request import Request


def _priority(request: Request) -> int:
    return request.submit.priority


class PriorityPolicy(FcfsPolicy):
    """A request takes rows and pages of less important ones. A paused request has no bound."""

    importance = staticmethod(_priority)

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        return PlainLane(adapter, _priority)

    def victim(
        self, candidates: Sequence[Request], cost: Callable[[Request], tuple[int, int]]
    ) -> Request | None:
        least = max(map(_priority, candidates), default=0)
        return super().victim([r for r in candidates if _priority(r) == least], cost)
