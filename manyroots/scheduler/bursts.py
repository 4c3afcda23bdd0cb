"""Requests that wait until another one has computed their common prefix.

Layers with a recurrent state share nothing within a step: a state can be restored only after the
step that saves it. In a burst with one prefix, the first request therefore computes it up to the
point where most others diverge, and saves its state there. The others wait outside the queue for
those steps only, and then resume from that state. Knows no pages and no states: the cache decides
where a step ends, what is saved and what is found. If no layer has a state, nothing waits here.
"""

from __future__ import annotations

from collections.abc import Iterable

from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.scheduler.lanes import Importance
from manyroots.scheduler.request import Request, State
from manyroots.scheduler.rows import Rows

LOOK_AHEAD = 64
"""Most waiting requests with which a starting one is compared."""


class Bursts:
    """The leaders, which compute a prefix for others, and their followers."""

    def __init__(self, cache: PrefixCache, rows: Rows, importance: Importance | None) -> None:
        self._cache = cache
        self._rows = rows
        self._importance = importance
        self._page_size = cache.page_size
        self._least = cache.least_shared_pages
        self.is_on = self._least > 0
        self._leaders: dict[Request, tuple[Lease, int]] = {}
        """Leaders, each with its lease and the number of pages after which the others diverge."""
        self.followers: dict[Request, Request] = {}
        """Followers, each with the request that it waits for."""

    def lead(self, request: Request, lease: Lease, others: Iterable[Request]) -> None:
        """A request is about to start: let it stop where its state serves most of `others`, which
        have not started."""
        self._lead_from(lease.num_cached_tokens // self._page_size, request, lease, others)

    def _lead_from(
        self, num_found: int, request: Request, lease: Lease, others: Iterable[Request]
    ) -> None:
        shared = [self._shared_pages(request, other) for other in others]
        shared = [pages for pages in shared if pages - num_found >= self._least]
        self._leaders.pop(request, None)
        if shared:
            # The boundary with the most pages saved, over all requests that can resume there; the
            # later if equal.
            end = max(
                set(shared),
                key=lambda end: ((end - num_found) * sum(each >= end for each in shared), end),
            )
            self._cache.save_at(lease, end)
            self._leaders[request] = (lease, end)

    def follow(self, request: Request, lease: Lease) -> bool:
        """Whether a claimed request should wait for a running one; it is then a follower, and its
        claim is released."""
        if request.wants_prompt_logprobs:
            return False
        num_found = lease.num_cached_tokens // self._page_size
        for leader, (_, end) in self._leaders.items():
            if leader.state is not State.RUNNING or end - num_found < self._least:
                continue
            if self._is_less(leader, request) or not self._waits(request, leader):
                continue
            self.followers[request] = leader
            return True
        return False

    def take_ready(self) -> list[Request]:
        """Followers that need not wait any more, before a step is planned: an earlier step saves
        the state, or none ever will."""
        for leader, (lease, end) in list(self._leaders.items()):
            row = leader.row
            # It may have been retracted or paused, and have started again since.
            runs = leader.state is State.RUNNING and leader.lease is lease and row is not None
            num_done = int(self._rows.computed[row]) if runs else 0
            if runs and num_done < end * self._page_size:
                continue
            del self._leaders[leader]
            if runs:
                # Some may share more with it than those that diverge here.
                waiting = [each for each, awaited in self.followers.items() if awaited is leader]
                num_done = max(end, num_done // self._page_size)
                self._lead_from(num_done, leader, lease, waiting)
        ready = [each for each, leader in self.followers.items() if not self._waits(each, leader)]
        for each in ready:
            del self.followers[each]
        return ready

    def _waits(self, request: Request, leader: Request) -> bool:
        """Whether a leader still computes what a request resumes from."""
        if leader not in self._leaders:
            return False
        _, end = self._leaders[leader]
        return self._shared_pages(request, leader) >= end

    def _is_less(self, leader: Request, request: Request) -> bool:
        """Whether the leader may have to wait for requests that the other need not wait for."""
        importance = self._importance
        return importance is not None and importance(leader) > importance(request)

    def _shared_pages(self, one: Request, other: Request) -> int:
        """Pages of their common prefix from which both can resume: one token remains to be
        computed."""
        size = self._page_size
        end = (min(one.num_tokens, other.num_tokens) - 1) // size
        end = min(end, one.key.common_run(other.key))
        if other.wants_prompt_logprobs or end == 0:
            return 0
        mine, theirs = one.tokens[: end * size], other.tokens[: end * size]
        if mine[0] != theirs[0]:
            return 0
        differs = mine != theirs
        first = int(differs.argmax())
        return first // size if differs[first] else end
