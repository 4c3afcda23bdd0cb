"""Which cached units go first: those of the pages that were used longest ago.

One queue per plane. On an ordered plane only what has nothing behind it can go, the tails of the
tree: holders come in prefixes there, so a held unit has only held ones above it. On the others any
loose unit can go: of a family that reads everything the end of a node first, of the others its
front, because the pages at its end are resumed from. Ties break on the order of creation.
O(log n) per node taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

import numpy as np

from manyroots.cache.index import Index
from manyroots.cache.planes import ABSENT, Plane
from manyroots.cache.tree import Indices, Node
from manyroots.ids import Tier

LOOK_AHEAD = 32
"""Nodes that write-back on eviction looks at per step: bounds what a step may cost."""
MIN_SWEEP = 1024
"""Entries that a queue may have before it is worth looking for those of nodes that are gone."""

Entry = tuple[int, int, Node]
"""Last use, order of creation, and whose."""


class Evictor:
    """A queue of one plane's nodes by last use, brought up to date as entries are looked at."""

    def __init__(self, index: Index, plane: Plane) -> None:
        self._index = index
        self._plane = plane
        self._is_ordered = plane.is_ordered
        self._takes_ends = plane.family.is_ordered
        self._pool = index.pools[plane.index]
        self._queue: list[Entry] = []
        self._sweep_at = MIN_SWEEP
        self._bit = 1 << plane.index
        self._counts_arrivals = plane.tier is Tier.HOST

    def offer(self, node: Node) -> None:
        """`node` may have units that can go now."""
        if node.queued & self._bit or not self._can_go(node):
            return
        node.queued |= self._bit
        heapq.heappush(self._queue, (self._used(node), node.serial, node))
        if len(self._queue) >= self._sweep_at:
            self._sweep()

    def evict(self, count: int) -> None:
        """Free at least `count` cached units; the caller has made sure that there are as many."""
        # Counted by what is free: losing one page may take others along.
        target = self._pool.num_free + count
        while self._pool.num_free < target:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued &= ~self._bit
            if not self._can_go(node):
                continue
            if self._used(node) != last_used:
                self.offer(node)
                continue
            places = self.loose(node, target - self._pool.num_free)
            self._index.remove(node, self._plane.index, places)

    def next_nodes(self, count: int) -> list[Node]:
        """Nodes whose units would go next, up to `count` units; changes nothing."""
        nodes: list[Node] = []
        for _, _, node in islice(_in_order(self._queue), LOOK_AHEAD):
            if count <= 0:
                break
            if self._can_go(node):
                nodes.append(node)
                count -= node.counts[self._plane.index]
        return nodes

    def loose(self, node: Node, count: int) -> Indices:
        """Pages of a node whose units can go, ascending: the `count` that should go first."""
        units, holders = node.units[self._plane.index], self._pool.holders
        if self._is_ordered:
            # Units come in prefixes and so do holders: what is loose is the end of what is there.
            end = node.counts[self._plane.index]
            first = max(0, end - count)
            num_held = int(np.count_nonzero(holders[units[first:end]]))
            return np.arange(first + num_held, end)
        places: Indices = (units != ABSENT).nonzero()[0]
        places = places[holders[units[places]] == 0]
        return places[-count:] if self._takes_ends else places[:count]

    def _used(self, node: Node) -> int:
        """What has just come to the host is not the first to go from there (H07)."""
        return max(node.last_used, node.last_arrived) if self._counts_arrivals else node.last_used

    def _can_go(self, node: Node) -> bool:
        plane = self._plane.index
        return (
            node.is_attached
            and node.counts[plane] > 0
            and not (self._is_ordered and node.below[plane])
        )

    def _sweep(self) -> None:
        """Forget nodes that have left the tree: where nothing is evicted they would pile up."""
        self._queue = [entry for entry in self._queue if entry[2].is_attached]
        heapq.heapify(self._queue)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._queue))


def _in_order(queue: list[Entry]) -> Iterator[Entry]:
    """A heap's entries, smallest first, without taking them out: O(log n) for the n-th."""
    ahead = [(queue[0], 0)] if queue else []
    while ahead:
        entry, place = heapq.heappop(ahead)
        yield entry
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(queue):
                heapq.heappush(ahead, (queue[child], child))
