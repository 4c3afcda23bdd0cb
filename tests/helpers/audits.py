"""Audits of an engine's cache: after every step while it is small, and less often when it is large.

An audit reads every page. In tests whose caches grow it took two thirds of all processor time, so
the number of steps between two audits grows with the pages in use. The last step is always audited.
"""

from __future__ import annotations

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache

SMALL = 96
"""Pages in use, on all tiers. A cache that never has more is audited after every step."""
PAGES_PER_STEP = 32
"""A larger one waits a step for each of these."""


class CacheAudits:
    """Of one engine."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._num_skipped = 0

    def after_step(self, *, is_last: bool) -> None:
        """`is_last`: nothing is left to do."""
        self._num_skipped += 1
        if is_last or self._num_skipped > self._most_skipped():
            audit(self._cache)
            self._num_skipped = 0

    def _most_skipped(self) -> int:
        num_used = sum(pool.num_units - pool.num_free for pool in self._cache.index.pools)
        return 0 if num_used <= SMALL else num_used // PAGES_PER_STEP
