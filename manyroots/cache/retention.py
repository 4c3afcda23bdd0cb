"""Prefixes that callers asked to keep: how strongly, and for how long (T13).

A request may mark ranges of its prompt. When it ends, the nodes of its path up to a range's last
whole page get a `PrefixMark`. Marked units are evicted after all others, on every plane, so pages,
window pages, saved states and host copies are kept alike. A mark ends

- when its time is over (`pass_time`);
- when its tenant's marks exceed the tenant's share of the pool: the weakest end first;
- when nothing else can be evicted on the device: the weakest end first.

The host evicts copies of marked pages instead, since the device has these pages while their mark
lasts. So a mark never keeps a request waiting, and a tenant that marks everything displaces its own
marks alone. The weakest mark has the lowest priority and, among equals, is the oldest. A mark that
has ended leaves its units where plain use puts them. O(log n) per mark.

Storage is told of marks (`take_keeps`): when a mark is set, when marked pages are written, and when
a mark ends before its time. Otherwise its end needs no word, because storage knows the time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from manyroots.cache.eviction import Evictor
from manyroots.cache.lease import Lease
from manyroots.cache.planes import CacheLayout
from manyroots.cache.publishing import nearest_attached
from manyroots.cache.storage_health import StorageHealth
from manyroots.cache.tree import Node, PrefixMark, PrefixTree
from manyroots.messages import Retention
from manyroots.step import KeepStored

_Entry = tuple[float, int, PrefixMark]
"""Priority or end, order of creation, the mark."""


class Marks:
    """The marks of one cache."""

    def __init__(
        self,
        layout: CacheLayout,
        tree: PrefixTree,
        evictors: list[Evictor],
        storage: StorageHealth | None,
    ) -> None:
        """`storage`: None without a storage tier."""
        self._tree = tree
        self._storage = storage
        self._keeps: list[KeepStored] = []
        """Not taken yet."""
        self._page_size = layout.page_size
        self._pool_pages = layout.device[0].num_units
        self._evictors = evictors
        for evictor in evictors:
            evictor.end_mark = self.end
        self._now_s = 0.0
        self._next_serial = 1
        self._due: list[_Entry] = []
        self._weakest: dict[str | None, list[_Entry]] = {}
        """By tenant."""
        self._num_pages: Counter[str | None] = Counter()
        """By tenant: pages of marked nodes."""

    @property
    def is_empty(self) -> bool:
        """Whether no mark can end by time."""
        return not self._due

    @property
    def num_pages(self) -> int:
        """Pages that are marked, of all tenants."""
        return self._num_pages.total()

    def pass_time(self, now_s: float) -> None:
        """End the marks that have expired. The caller has the clock."""
        self._now_s = max(self._now_s, now_s)
        while self._due and self._due[0][0] <= self._now_s:
            self.end(heapq.heappop(self._due)[2])

    def keep(self, lease: Lease, asked: Retention) -> None:
        """Mark the path of a lease that ends."""
        path: list[Node] = []
        node = nearest_attached(lease.cursor)
        while node.parent is not None:
            path.append(node)
            node = node.parent
        marks = self._marks_of(asked, min(lease.num_published_pages, path[0].end) if path else 0)
        for node in reversed(path):
            for end, mark in marks:
                if node.first < end < node.end:
                    self._set(self._tree.split(node, end), mark)
                elif end >= node.end:
                    self._set(node, mark)
                    break
        for _, mark in marks:
            self._open(mark)
        limit = int(asked.share * self._pool_pages)
        while self._num_pages[asked.tenant] > limit:
            self.end(heapq.heappop(self._weakest[asked.tenant])[2])
        for _, mark in marks:
            if not mark.is_over and mark.until_s > self._now_s:
                self._tell_storage(b"".join(_hashes_under(mark)), mark.until_s)

    def written(self, pages: Iterable[tuple[Node, bytes]]) -> None:
        """Pages, with their hashes, are on their way to storage."""
        marked: dict[PrefixMark, list[bytes]] = {}
        for node, page_hash in pages:
            if node.mark is not None and not node.mark.is_over:
                marked.setdefault(node.mark, []).append(page_hash)
        for mark, hashes in marked.items():
            self._tell_storage(b"".join(hashes), mark.until_s)

    @property
    def has_keeps(self) -> bool:
        return bool(self._keeps)

    def take_keeps(self) -> tuple[KeepStored, ...]:
        """What storage is to be told with the step being planned."""
        keeps, self._keeps = tuple(self._keeps), []
        return keeps

    def end(self, mark: PrefixMark) -> None:
        """Return its nodes to plain use. Does nothing if it has ended."""
        if mark.is_over:
            return
        mark.is_over = True
        self._num_pages[mark.tenant] -= mark.num_pages
        mark.num_pages = 0
        if not self._num_pages[mark.tenant]:
            del self._num_pages[mark.tenant]
            self._weakest.pop(mark.tenant, None)
        for evictor in self._evictors:
            evictor.mark_ended(mark)
        if mark.until_s > self._now_s:
            # Otherwise a tenant would hold more of storage than its share lets it mark.
            self._tell_storage(b"".join(_hashes_under(mark)), self._now_s)
        mark.nodes.clear()

    def _marks_of(self, asked: Retention, num_pages: int) -> list[tuple[int, PrefixMark]]:
        """(end in pages, mark), ascending. The path to a page is worth as much as the page."""
        marks: list[tuple[int, PrefixMark]] = []
        priority, until_s = 0, 0.0
        for wanted in sorted(asked.ranges, key=lambda each: -each.until_token):
            priority = max(priority, wanted.priority)
            until_s = max(until_s, self._now_s + wanted.for_s)
            end = min(wanted.until_token // self._page_size, num_pages)
            if end and not (marks and marks[-1][0] == end):
                marks.append((end, PrefixMark(asked.tenant, priority, until_s, self._next_serial)))
                self._next_serial += 1
        marks.reverse()
        return marks

    def _set(self, node: Node, mark: PrefixMark) -> None:
        """A newer mark replaces an older one, unless that is as strong and lasts as long."""
        old = node.mark if node.is_marked else None
        if old is not None and old.priority >= mark.priority and old.until_s >= mark.until_s:
            return
        node.mark = mark
        mark.nodes.append(node)
        mark.num_pages += node.num_pages
        self._num_pages[mark.tenant] += node.num_pages
        if old is not None:
            old.num_pages -= node.num_pages
            self._num_pages[old.tenant] -= node.num_pages
            for evictor in self._evictors:
                evictor.mark_replaced(node, old)

    def _open(self, mark: PrefixMark) -> None:
        heapq.heappush(self._due, (mark.until_s, mark.serial, mark))
        weakest = self._weakest.setdefault(mark.tenant, [])
        heapq.heappush(weakest, (mark.priority, mark.serial, mark))

    def _tell_storage(self, hashes: bytes, until_s: float) -> None:
        """Nothing is said while storage is not written to: a dead one must not be waited for."""
        if hashes and self._storage is not None and self._storage.may_write:
            self._keeps.append(KeepStored(hashes, max(0.0, until_s - self._now_s)))


def _hashes_under(mark: PrefixMark) -> Iterable[bytes]:
    """Of the pages that it, and no newer mark, keeps."""
    return (node.hashes for node in mark.nodes if node.mark is mark and node.is_attached)
