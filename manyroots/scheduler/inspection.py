"""Shows what the scheduler's requests do now, and what waiting ones wait for; read-only.

Takes the scheduler's parts between two steps; gives rows of a table. This module is the live page's
only view of the scheduler. Changes nothing, and keeps nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from manyroots.cache.cache import PrefixCache
from manyroots.ids import AdapterDigest
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.lanes import Importance
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Rows
from manyroots.snapshot import RequestView, WaitReason

TenantNumber = Callable[[str | None], int]
"""The number that represents a salt."""

_WAITS_FOR = {
    State.FETCHING: (WaitReason.LOAD, "storage is asked for its pages"),
    State.LOADING: (WaitReason.LOAD, "its pages are on their way to the device"),
    State.PAUSED: (WaitReason.ADAPTER, "paused while another adapter runs"),
}


@dataclass(frozen=True, slots=True)
class WaitingCauses:
    """From the last planned step: why requests did not start."""

    is_paused: bool
    is_short_of_pages: bool
    """A running request lacked a page, so none was started."""
    without_room: Collection[AdapterDigest | None]
    """Adapters whose next request found no room for its pages."""
    importance: Importance | None
    """The policy's order of requests, if it has one."""


class SchedulerInspection:
    """Reads requests, one after the other."""

    def __init__(
        self,
        cache: PrefixCache,
        rows: Rows,
        adapters: Residency,
        causes: WaitingCauses,
        tenant: TenantNumber,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._adapters = adapters
        self._causes = causes
        self._tenant = tenant
        self._by_adapter: dict[AdapterDigest | None, tuple[WaitReason, str]] = {}
        """The cause for the next waiting request of each adapter."""

    def views(self, requests: Iterable[Request]) -> list[RequestView]:
        waiting = [r for r in requests if r.state is State.WAITING]
        importance = self._causes.importance
        first = 0 if importance is None else min(map(importance, waiting), default=0)
        return [self._view(request, first) for request in requests]

    def _view(self, request: Request, first_priority: int) -> RequestView:
        submit, lease, row = request.submit, request.lease, request.row
        wait, reason = self._wait(request, first_priority)
        num_prompt = request.num_prompt_tokens
        if row is not None:
            computed = self._rows.computed.item(row)
            num_known = max(num_prompt, self._rows.committed.item(row) + 1)
        else:
            computed, num_known = request.num_computed_tokens, request.num_tokens
        host = num_stored = num_pages = node = 0
        limit = ""
        if lease is not None:
            num_stored = min(request.num_fetched_tokens, lease.num_host_tokens)
            host = lease.num_host_tokens - num_stored
            num_pages, node = self._cache.held_by(lease)
            if request.num_cached_tokens is not None:
                limit = lease.limit.label
        return RequestView(
            submit.request_id,
            submit.adapter,
            self._tenant(submit.salt),
            request.state.value,
            wait.value,
            reason,
            submit.priority,
            num_prompt,
            min(computed, num_known),
            num_known - num_prompt,
            request.max_num_tokens - num_prompt,
            request.num_cached_tokens or 0,
            host,
            num_stored,
            limit,
            num_pages,
            node,
        )

    def _wait(self, request: Request, first_priority: int) -> tuple[WaitReason, str]:
        if request.state in _WAITS_FOR:
            return _WAITS_FOR[request.state]
        if request.state is not State.WAITING:
            return WaitReason.NOTHING, ""
        causes = self._causes
        if causes.is_paused:
            return WaitReason.PAUSED, "the engine is paused"
        if causes.importance is not None and causes.importance(request) > first_priority:
            return WaitReason.PRIORITY, f"a request of priority {first_priority} waits before it"
        adapter = request.group[0]
        known = self._by_adapter.get(adapter)
        if known is None:
            known = self._by_adapter[adapter] = self._next_waits_for(adapter)
        return known

    def _next_waits_for(self, adapter: AdapterDigest | None) -> tuple[WaitReason, str]:
        if adapter is not None:
            match self._adapters.readiness(adapter):
                case Readiness.LOADING:
                    return WaitReason.LOAD, "its adapter's weights are on their way to the device"
                case Readiness.CAPPED:
                    most = self._adapters.limits.max_loras
                    return (
                        WaitReason.ADAPTER,
                        f"{most} other adapters run, as many as --max-loras allows",
                    )
                case Readiness.ABSENT:
                    return WaitReason.LOAD, "its adapter's weights are not on the device yet"
        causes = self._causes
        if causes.is_short_of_pages:
            return WaitReason.MEMORY, "requests that run need all pages that can be had"
        if adapter in causes.without_room:
            return (
                WaitReason.MEMORY,
                "there are not enough pages for its prompt and its first output",
            )
        if not self._rows.free:
            return WaitReason.BUDGET, f"all {self._rows.count} rows are taken (--max-num-seqs)"
        return WaitReason.BUDGET, "the step's tokens went to requests before it"


def count_by_adapter(requests: Iterable[Request]) -> dict[AdapterDigest, Counter[str]]:
    """The number of each adapter's requests in each state."""
    counts: dict[AdapterDigest, Counter[str]] = {}
    for request in requests:
        adapter = request.group[0]
        if adapter is not None:
            counts.setdefault(adapter, Counter())[request.state.value] += 1
    return counts
