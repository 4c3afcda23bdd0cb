"""Who gives way when there is no room: whose request is retracted, to run on later.

Importance comes first where the policy is by priority: the least important gives way, and only to
one that is more important or that runs already. Among equals it is the one that is cheapest to
resume. Knows the rows, the builder and the cache; changes only what the builder has placed.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.scheduler.plan_builder import PlanBuilder
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Resting
from manyroots.scheduler.rows import Rows


class Victims:
    """Chooses among those that run and those that rest."""

    def __init__(
        self, rows: Rows, resting: Resting, cache: PrefixCache, *, by_priority: bool
    ) -> None:
        self._rows = rows
        self._resting = resting
        self._cache = cache
        self._by_priority = by_priority

    def for_running(self, request: Request, builder: PlanBuilder) -> Request | None:
        """Who gives way to a request that runs and lacks pages; it may be that request itself.

        Of those not placed in this step yet, be it because they rest, and of those less important
        than it, whose token can still be taken back.
        """
        placed = builder.placed_rows()
        candidates = [r for r in self._rows.running if r.row not in placed]
        candidates += self._resting
        if self._by_priority:
            candidates += self._less_important(request, builder)
        return self._choose(candidates)

    def for_waiting(self, request: Request, builder: PlanBuilder) -> Request | None:
        """Who gives way to a request that waits: somebody less important, if anybody is. Equals
        never do, or they would take each other's place for ever."""
        if not self._by_priority:
            return None
        placed = builder.placed_rows()
        idle = [*(r for r in self._rows.running if r.row not in placed), *self._resting]
        less = [r for r in idle if r.submit.priority > request.submit.priority]
        return self._choose(less + self._less_important(request, builder))

    def _less_important(self, request: Request, builder: PlanBuilder) -> list[Request]:
        """Those who only decode in this step, which can be taken back."""
        decoding = map(self._rows.request_at, builder.decoding_rows())
        return [r for r in decoding if r.submit.priority > request.submit.priority]

    def _choose(self, candidates: list[Request]) -> Request | None:
        """The least important; of those, the one with the fewest tokens to compute again; the
        youngest, where several are."""
        if self._by_priority and candidates:
            least = max(r.submit.priority for r in candidates)
            candidates = [r for r in candidates if r.submit.priority == least]
        return min(candidates, key=self._cost_to_resume, default=None)

    def _cost_to_resume(self, request: Request) -> tuple[int, int]:
        assert request.lease is not None
        num_computed = request.num_computed_tokens
        if request.row is not None:
            num_computed = int(self._rows.computed[request.row])
        num_found = self._cache.num_resumable_tokens(request.lease, request.tokens)
        return num_computed - num_found, -request.serial
