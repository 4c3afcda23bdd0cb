"""Which cached pages go first: the tails of the leaves that were used longest ago.

Holders come in prefixes, so a page that is held has only held pages above it; what can go is
always the end of some leaf. Ties break on the order of creation. O(log n) per leaf taken.
"""

from __future__ import annotations

import heapq

import numpy as np

from manyroots.cache.pool import PagePool
from manyroots.cache.tree import Node, PrefixTree


class Evictor:
    """A queue of leaves by last use, brought up to date as entries are looked at."""

    def __init__(self, tree: PrefixTree, pool: PagePool) -> None:
        self._tree = tree
        self._pool = pool
        self._queue: list[tuple[int, int, Node]] = []
        self._tick = 0

    def touch(self, node: Node) -> None:
        """The path down to `node` was used now."""
        self._tick += 1
        current: Node | None = node
        while current is not None:
            current.last_used = self._tick
            current = current.parent

    def offer(self, node: Node) -> None:
        """`node` may have become a leaf whose tail nobody holds."""
        if self._can_go(node) and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._queue, (node.last_used, node.serial, node))

    def evict(self, count: int) -> None:
        """Free `count` cached pages; the caller has made sure that there are as many."""
        while count > 0:
            last_used, _, node = heapq.heappop(self._queue)
            node.is_queued = False
            if not self._can_go(node):
                continue
            if node.last_used != last_used:
                self.offer(node)
                continue
            count -= self._take_tail(node, count)

    def _can_go(self, node: Node) -> bool:
        return node.is_attached and node.is_leaf and node is not self._tree.root

    def _take_tail(self, leaf: Node, count: int) -> int:
        loose = _num_loose_at_end(self._pool, leaf)
        taken = min(loose, count)
        if taken == 0:
            return 0
        parent = leaf.parent
        assert parent is not None
        self._pool.unindex(self._tree.trim(leaf, taken))
        if leaf.is_attached and taken < loose:
            self.offer(leaf)
        elif not leaf.is_attached:
            self.offer(parent)
        return taken


def _num_loose_at_end(pool: PagePool, leaf: Node) -> int:
    """Pages at the end of a leaf that nobody holds."""
    held = np.flatnonzero(pool.holders[leaf.pages])
    return len(leaf.pages) if len(held) == 0 else len(leaf.pages) - 1 - int(held[-1])
