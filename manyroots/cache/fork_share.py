"""Learns how much of a pool to reserve for shared prefixes, by comparison with LRU.

A run of pages is a *fork* if requests have continued from it in more than one way, or have repeated
it unchanged: a system prompt, or a document with several questions, but not the turns of one
conversation. Forks within their share of the pool outlive everything else, so that one-time prompts
cannot flush them. The best share depends on the traffic, so both errors are counted:

- a fork was found that LRU would have evicted by then: the share was worth its room, and grows;
- a page was evicted that LRU would have kept, in place of an older fork, and was computed again:
  the share cost more than it gave, and shrinks.

Both are measured against the same LRU, which would hold the pages that were evicted early in place
of the forks. Their names are kept here, for as many pages as forks keep. O(1) per event; no tokens
are kept.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from manyroots.cache.keys import Owner

START = 1 / 4
LEAST = 1 / 64
"""Never zero: without trying, nothing is learned. Costs at most this much of the pool."""
MOST = 4 / 5
"""New pages must stay long enough to be found again, or they could never become forks."""
RATE = 4
"""Pages by which the share changes for each page of evidence."""
MAX_NAMES = 16384
"""Bounds the memory for pages that were evicted early."""

Name = tuple[int, Owner | None, int]
"""Name of a run that has left the tree: the serial of the node before it, its owner, and a checksum
of its first page. Two runs with one name count as one: a wrong hint, never a wrong page."""


class Early(NamedTuple):
    """A run that LRU would still have."""

    last_used: int
    num_pages: int


def name_of(parent: int, owner: Owner | None, page: bytes) -> Name:
    return parent, owner, zlib.crc32(page)


class ForkShare:
    """The share of every pool that forks may keep; learned on one."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self.share = START
        self.horizon = -1
        """LRU would have evicted everything last used before this."""
        self.early: dict[Name, Early] = {}
        """Runs that were evicted too early, if they are published again."""
        self._num_early_pages = 0

    def found(self, num_pages: int) -> None:
        """Pages were found that had not been used since before the horizon."""
        self._move(num_pages)

    def published(self, name: Name) -> None:
        """A new run is in the tree; it may be one that LRU would have kept."""
        early = self.early.pop(name, None)
        if early is not None:
            self._num_early_pages -= early.num_pages
            self._move(-early.num_pages)

    def evicted(self, last_used: int) -> None:
        """Pages were evicted that LRU would have evicted, too."""
        self.horizon = max(self.horizon, last_used)

    def evicted_early(self, name: Name, last_used: int, num_pages: int, num_kept: int) -> None:
        """Pages were evicted while less recently used forks stay, `num_kept` pages of them."""
        before = self.early.pop(name, None)
        if before is not None:
            self._num_early_pages -= before.num_pages
            num_pages += before.num_pages
        self.early[name] = Early(last_used, num_pages)
        self._num_early_pages += num_pages
        while self._num_early_pages > num_kept or len(self.early) > MAX_NAMES:
            oldest = self.early.pop(next(iter(self.early)))
            self._num_early_pages -= oldest.num_pages
            self.evicted(oldest.last_used)

    def audit(self) -> None:
        """Raises AssertionError if the share or its counts are wrong."""
        assert LEAST <= self.share <= MOST, "the share of forks is out of bounds"
        total = sum(early.num_pages for early in self.early.values())
        assert total == self._num_early_pages, "early pages are counted wrongly"
        assert len(self.early) <= MAX_NAMES, "too much is kept of what was evicted early"

    def _move(self, num_pages: int) -> None:
        share = self.share + RATE * num_pages / self._num_units
        self.share = min(MOST, max(LEAST, share))
