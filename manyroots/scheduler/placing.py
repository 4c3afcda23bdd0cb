"""What beginning a request and continuing one have in common: how many tokens, and placing them.

Knows the cache and a step's draft; not who is next, nor what to do when there is no room.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.config import SchedulerSettings
from manyroots.scheduler.draft import Draft
from manyroots.scheduler.request import Request


class Placer:
    """Places parts of requests in steps."""

    def __init__(self, settings: SchedulerSettings, cache: PrefixCache) -> None:
        self._most_tokens = settings.long_prefill_token_threshold
        self.most_step_tokens = settings.max_num_batched_tokens
        """Of one request, at most, in one step."""
        if self._most_tokens is not None:
            self.most_step_tokens = min(self.most_step_tokens, self._most_tokens)
        self._cache = cache

    def chunk(self, request: Request, lease: Lease, computed: int, draft: Draft) -> int:
        """How many of its tokens a request may compute in this step, behind those computed."""
        num_tokens = request.num_tokens - computed
        if num_tokens < 1:
            num_tokens = 1  # A sequence that decodes has one to compute, known by then or not.
        if num_tokens > draft.num_tokens_left:
            num_tokens = draft.num_tokens_left
        if self._most_tokens is not None:
            num_tokens = min(num_tokens, self._most_tokens)
        return self._cache.clip(lease, computed, num_tokens)

    def place(self, request: Request, lease: Lease, computed: int, num: int, draft: Draft) -> None:
        """The request has what it needs for `num` tokens more: they are computed in this step."""
        end = computed + num
        self._cache.announce(lease, request.tokens, end, draft.step_id)
        draft.place(request, lease, num, end)
