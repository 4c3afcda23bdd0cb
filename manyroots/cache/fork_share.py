"""How much of a pool is kept for shared prefixes: learned from what LRU would have done instead.

A run of pages is a *fork* when requests have gone on from it in more ways than one, or have asked
for it again as it is: a system prompt, a document with several questions, not the turns of one
talk. Forks within their share of the pool outlive everything else, so that prompts asked once can't
flush them. How large a share pays differs from traffic to traffic, so both errors are counted:

- a fork was found that LRU would have evicted by then: the share was worth its room, and grows;
- a page was evicted that LRU would have kept, in place of an older fork, and was computed again:
  the share cost more than it gave, and shrinks.

Both against the same LRU: it would have the pages evicted early (their names are kept here, as many
pages of them as forks are kept) in place of the forks. O(1) per event; no tokens are kept.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from manyroots.cache.keys import Owner

START = 1 / 4
LEAST = 1 / 64
"""Never none: what is not tried is not learned. Costs at most so much of the pool."""
MOST = 4 / 5
"""New work must stay long enough to be found again, or it could never be kept."""
RATE = 4
"""Pages that the share grows or shrinks by for each page of evidence."""
MAX_NAMES = 16384
"""Bounds the memory for what was evicted early."""

Name = tuple[int, Owner | None, int]
"""Of a run that has left the tree: the serial of the node before it, whose it was, and a checksum
of its first page. Two runs with one name would count as one: a wrong hint, never a wrong page."""


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
        """Whatever was last used before this, LRU would have evicted."""
        self.early: dict[Name, Early] = {}
        """What was evicted too early, should it be published again."""
        self._num_early_pages = 0

    def found(self, num_pages: int) -> None:
        """Pages that nobody had used since before the horizon were found."""
        self._move(num_pages)

    def published(self, name: Name) -> None:
        """A new run is in the tree: it may be one that LRU would not have lost."""
        early = self.early.pop(name, None)
        if early is not None:
            self._num_early_pages -= early.num_pages
            self._move(-early.num_pages)

    def evicted(self, last_used: int) -> None:
        """Pages have gone that LRU would have evicted too."""
        self.horizon = max(self.horizon, last_used)

    def evicted_early(self, name: Name, last_used: int, num_pages: int, num_kept: int) -> None:
        """Pages have gone while forks that were used before them stay, `num_kept` pages of them."""
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
        """Raises AssertionError where the share or what is counted for it is wrong."""
        assert LEAST <= self.share <= MOST, "the share of forks is out of bounds"
        total = sum(early.num_pages for early in self.early.values())
        assert total == self._num_early_pages, "early pages are counted wrongly"
        assert len(self.early) <= MAX_NAMES, "too much is kept of what was evicted early"

    def _move(self, num_pages: int) -> None:
        share = self.share + RATE * num_pages / self._num_units
        self.share = min(MOST, max(LEAST, share))
