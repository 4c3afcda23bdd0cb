"""What beginning a request and continuing one have in common: how many tokens, and placing them.

Knows the cache and a step's draft; not who is next, nor what to do when there is no room.
"""

from __future__ import annotations

from manyroots.cache.cache import PrefixCache
from manyroots.config import SchedulerSettings
from manyroots.scheduler.draft import Draft
from manyroots.scheduler.request import Request


class Placer:
    """Places parts of requests in steps."""

    def __init__(self, settings: SchedulerSettings, cache: PrefixCache) -> None:
        self._most_tokens = settings.long_prefill_token_threshold
        self._cache = cache

    def chunk(self, request: Request, computed: int, draft: Draft) -> int:
        """How many of its tokens a request may compute in this step, behind those computed."""
        assert request.lease is not None
        num_tokens = request.num_tokens - computed
        if num_tokens < 1:
            num_tokens = 1  # A sequence that decodes has one to compute, known by then or not.
        if num_tokens > draft.num_tokens_left:
            num_tokens = draft.num_tokens_left
        if self._most_tokens is not None:
            num_tokens = min(num_tokens, self._most_tokens)
        return self._cache.clip(request.lease, computed, num_tokens)

    def place(self, request: Request, computed: int, num_tokens: int, draft: Draft) -> None:
        """The request has what it needs for `num_tokens` more: they are computed in this step."""
        lease = request.lease
        assert lease is not None
        self._cache.announce(lease, request.tokens, computed + num_tokens, draft.step_id)
        draft.place(request, lease, computed, num_tokens)
