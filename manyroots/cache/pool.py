"""The pages of one family on the device: who holds each, which are free.

Counts only; the bytes are the execute half's. A page is in exactly one of three states:
free (on the stack), cached (indexed by the tree, held by nobody) or held (by at least one lease;
indexed or not). `free + cached + held = total` always.
"""

from __future__ import annotations

import numpy as np

from manyroots.step import Int32s


class PagePool:
    """A fixed number of pages with a count of holders each."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.holders = np.zeros(num_pages, np.int32)
        self.indexed = np.zeros(num_pages, np.bool_)
        # A stack, lowest page on top, so that two engines fed the same calls agree on every page.
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages; the caller has made sure that there are as many."""
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self.holders[taken] = 1
        return taken

    def hold(self, pages: Int32s) -> None:
        """One more holder for pages that the tree indexes."""
        self.num_cached -= int(np.count_nonzero(self.holders[pages] == 0))
        self.holders[pages] += 1

    def drop(self, pages: Int32s) -> None:
        """One holder fewer; what nobody holds becomes cached if indexed, free if not."""
        self.holders[pages] -= 1
        orphans = pages[self.holders[pages] == 0]
        indexed = self.indexed[orphans]
        self.num_cached += int(np.count_nonzero(indexed))
        # Reversed, so that the first page of a sequence is the first to be taken again.
        self._free.extend(orphans[~indexed][::-1].tolist())

    def index(self, pages: Int32s) -> None:
        """The tree now leads to these held pages."""
        self.indexed[pages] = True

    def unindex(self, pages: Int32s) -> None:
        """The tree no longer leads to these; those that nobody holds become free."""
        self.indexed[pages] = False
        orphans = pages[self.holders[pages] == 0]
        self.num_cached -= len(orphans)
        self._free.extend(orphans[::-1].tolist())

    def free_pages(self) -> frozenset[int]:
        """For audits."""
        return frozenset(self._free)
