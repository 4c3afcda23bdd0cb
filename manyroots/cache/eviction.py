"""Which cached units go first: those of the pages that were used longest ago.

One queue per plane. On an ordered plane only what has nothing behind it can go, the tails of the
tree: holders come in prefixes there, so a held unit has only held ones above it. On the others any
loose unit can go: of a family that reads everything the end of a node first, of the others its
front, because the pages at its end are resumed from. Ties break on the order of creation.
O(log n) per node taken.
"""

from __future__ import annotations

import heapq

import numpy as np

from manyroots.cache.index import Index
from manyroots.cache.planes import ABSENT, Plane
from manyroots.cache.tree import Indices, Node

LOOK_AHEAD = 32
"""Nodes that write-back on eviction looks at per step: bounds what a step may cost."""


class Evictor:
    """A queue of one plane's nodes by last use, brought up to date as entries are looked at."""

    def __init__(self, index: Index, plane: Plane) -> None:
        self._index = index
        self._plane = plane
        self._pool = index.pools[plane.index]
        self._queue: list[tuple[int, int, Node]] = []
        self._bit = 1 << plane.index

    def offer(self, node: Node) -> None:
        """`node` may have units that can go now."""
        if not node.queued & self._bit and self._can_go(node):
            node.queued |= self._bit
            heapq.heappush(self._queue, (node.last_used, node.serial, node))

    def evict(self, count: int) -> None:
        """Free at least `count` cached units; the caller has made sure that there are as many."""
        # Counted by what is free: losing one page may take others along.
        target = self._pool.num_free + count
        while self._pool.num_free < target:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued &= ~self._bit
            if not self._can_go(node):
                continue
            if node.last_used != last_used:
                self.offer(node)
                continue
            self._take(node, target - self._pool.num_free)

    def next_nodes(self, count: int) -> list[Node]:
        """Nodes whose units would go next, up to `count` units; changes nothing."""
        nodes: list[Node] = []
        for _, _, node in heapq.nsmallest(LOOK_AHEAD, self._queue):
            if count <= 0:
                break
            if self._can_go(node):
                nodes.append(node)
                count -= node.counts[self._plane.index]
        return nodes

    def loose(self, node: Node) -> Indices:
        """Pages of a node whose units can go, in the order in which they should."""
        units = node.units[self._plane.index]
        places = np.flatnonzero(units != ABSENT)
        is_held = self._pool.holders[units[places]] > 0
        if not self._plane.is_ordered:
            loose = places[~is_held]
            return loose[::-1] if self._plane.family.is_ordered else loose
        held = np.flatnonzero(is_held)
        first_loose = int(held[-1]) + 1 if len(held) else 0
        return places[first_loose:][::-1]

    def _can_go(self, node: Node) -> bool:
        plane = self._plane
        return (
            node.is_attached
            and node.counts[plane.index] > 0
            and not (plane.is_ordered and node.below[plane.index])
        )

    def _take(self, node: Node, count: int) -> None:
        taken = self.loose(node)[:count]
        self._index.remove(node, self._plane.index, np.sort(taken))
