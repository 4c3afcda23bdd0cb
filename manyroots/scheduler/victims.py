"""Chooses the request to preempt when there is no room; it resumes later.

The policy chooses among the candidates. If requests differ in importance, one is preempted only for
a more important request or for a running one. Knows the rows, the builder and the cache; changes
only what the builder has placed.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.scheduler.plan_builder import PlanBuilder
from manyroots.scheduler.policies.protocol import SchedulingPolicy
from manyroots.scheduler.request import Request
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.slices import AdapterSlices


class Victims:
    """Chooses among paused and running requests."""

    def __init__(
        self, rows: Rows, slices: AdapterSlices, cache: PrefixCache, policy: SchedulingPolicy
    ) -> None:
        self._rows = rows
        self._slices = slices
        self._cache = cache
        self._policy = policy

    def for_running(self, request: Request, builder: PlanBuilder) -> Request | None:
        """The victim for a running request that lacks pages; it may be that request itself.

        A paused request, if there is any. Then one that is not placed in this step yet, or a less
        important one whose token can still be withdrawn.
        """
        placed = builder.placed_rows()
        candidates = self._slices.paused_requests()
        running = [r for r in self._rows.running if r.row not in placed]
        if self._policy.importance is not None:
            # The least important is preempted, whether it is paused or runs.
            candidates += [*running, *self._less_important(request, builder)]
        return self._policy.victim(candidates or running, self._cost_to_resume)

    def for_waiting(self, request: Request, builder: PlanBuilder) -> Request | None:
        """The victim for a waiting request: a less important one, if there is any. Equals never
        are, or they would preempt each other without end."""
        importance = self._policy.importance
        if importance is None:
            return None
        placed = builder.placed_rows()
        idle = [r for r in self._rows.running if r.row not in placed]
        idle += self._slices.paused_requests()
        less = [r for r in idle if importance(r) > importance(request)]
        less += self._less_important(request, builder)
        return self._policy.victim(less, self._cost_to_resume)

    def _less_important(self, request: Request, builder: PlanBuilder) -> list[Request]:
        """Requests that only decode in this step, which can be withdrawn."""
        importance = self._policy.importance
        assert importance is not None
        decoding = map(self._rows.request_at, builder.decoding_rows())
        return [r for r in decoding if importance(r) > importance(request)]

    def _cost_to_resume(self, request: Request) -> tuple[int, int]:
        """Tokens to recompute; among equals, the youngest request is preempted."""
        assert request.lease is not None
        num_computed = request.num_computed_tokens
        if request.row is not None:
            num_computed = int(self._rows.computed[request.row])
        num_found = self._cache.num_resumable_tokens(request.lease, request.tokens)
        return num_computed - num_found, -request.serial
