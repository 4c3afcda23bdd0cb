"""Chooses which cached units to evict: the least recently used, and forks only beyond their share.

One `Evictor` per plane. On an ordered plane only units without successors can go, the ends of the
tree's paths: holders form prefixes there, so only held units are above a held one. On other planes
any loose unit can go. A family that reads everything loses the end of a node first, the others its
front, because requests resume from the pages at its end. Ties go to the older node.

A family with a window needs a few pages before each point where requests will continue: the end of
a conversation (`next_turns.py`) or a fork. The rest of its pages, most of a long conversation, is
*spare* and is evicted first, whatever its last use. Spare pages help only a prompt that diverges at
a new point, which is a fork from then on. Continuing at the end of a conversation does not count as
use of its earlier points.

Nodes that a request has marked (`retention.py`) go last: the weakest mark ends first.

Nodes that are forks (`fork_share.py`) have their own queue. While it holds no more pages than their
share of the pool, other nodes go first; the excess goes by last use like everything else. O(log n)
per node taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np

from manyroots.cache.fork_share import ForkShare, name_of
from manyroots.cache.index import Index
from manyroots.cache.next_turns import NEAR, NextTurns
from manyroots.cache.planes import ABSENT, Plane, Units
from manyroots.cache.tree import TOKEN_BYTES, Indices, Node, PrefixMark
from manyroots.ids import Tier
from manyroots.step import Bools

LOOK_AHEAD = 32
"""Nodes that write-back on eviction considers per step; bounds the cost of a step."""
MIN_SWEEP = 1024
"""Entries that a queue may have before it is swept for removed nodes."""

QueueEntry = tuple[int, int, Node, int]
"""Last use, order of creation, the node, and its number of units when it was queued."""


class Queue:
    """Nodes of one plane by last use; entries are updated lazily."""

    def __init__(self) -> None:
        self.entries: list[QueueEntry] = []
        self.num_units = 0
        """Units of all entries, counted when each was queued."""
        self._sweep_at = MIN_SWEEP

    def push(self, last_used: int, node: Node, num_units: int) -> None:
        heapq.heappush(self.entries, (last_used, node.serial, node, num_units))
        self.num_units += num_units
        if len(self.entries) >= self._sweep_at:
            self._sweep()

    def pop(self) -> Node:
        _, _, node, num_units = heapq.heappop(self.entries)
        self.num_units -= num_units
        return node

    def remove(self, node: Node) -> bool:
        """Remove a node; returns whether it was there. O(n): for short queues."""
        left = [entry for entry in self.entries if entry[2] is not node]
        if len(left) == len(self.entries):
            return False
        heapq.heapify(left)
        self.entries, self.num_units = left, sum(entry[3] for entry in left)
        return True

    def in_order(self) -> Iterator[QueueEntry]:
        """The entries, smallest first, without removing them: O(log n) for the n-th."""
        ahead = [(self.entries[0], 0)] if self.entries else []
        while ahead:
            entry, place = heapq.heappop(ahead)
            yield entry
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self.entries):
                    heapq.heappush(ahead, (self.entries[child], child))

    def _sweep(self) -> None:
        """Drop nodes that have left the tree: without evictions they would accumulate."""
        self.entries = [entry for entry in self.entries if entry[2].is_attached]
        heapq.heapify(self.entries)
        self.num_units = sum(entry[3] for entry in self.entries)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self.entries))


def _refuse_to_end(mark: PrefixMark) -> None:
    raise AssertionError("a mark was made, and no cache set how to end it")


class Evictor:
    """Chooses the victims of one plane."""

    def __init__(
        self, index: Index, plane: Plane, forks: ForkShare | None, turns: NextTurns
    ) -> None:
        """`forks`: None for plain LRU."""
        self._index = index
        self._plane = plane
        self._is_ordered = plane.is_ordered
        self._takes_ends = plane.family.is_ordered
        self._pool = index.pools[plane.index]
        self._page_bytes = index.layout.page_size * TOKEN_BYTES
        self._forks = forks
        # Learned only on the plane where the order of use alone decides, and applied to all planes.
        self._teaches = forks is not None and plane.index == 0 and plane.is_ordered
        self._others = Queue()
        self._kept = Queue()
        """Forks."""
        self._marked: dict[PrefixMark, Queue] = {}
        """By mark: the nodes that it keeps."""
        self.end_mark: Callable[[PrefixMark], None] = _refuse_to_end
        """Set once, by the cache."""
        self._bit = 1 << plane.index
        self._turns = turns
        self._turns_version = turns.version
        self._reach = plane.family.reach
        self._spare = Queue()
        """Nodes that may have spare units, if the family has such."""
        self._spare_bit = 1 << len(index.layout.planes) + plane.index
        self._counts_arrivals = plane.tier is Tier.HOST

    @property
    def queues(self) -> tuple[tuple[int, tuple[Queue, ...]], ...]:
        """For audits: queues, with the bit that marks their nodes. All but forks, forks and marked
        nodes; then nodes that may have spare units."""
        units = (self._others, self._kept, *self._marked.values())
        return (self._bit, units), (self._spare_bit, (self._spare,))

    @property
    def is_up_to_date(self) -> bool:
        """For audits: false from a change of what is spare until some of it is evicted."""
        return self._turns_version == self._turns.version

    def offer(self, node: Node) -> None:
        """`node` may have units that can be evicted now."""
        if node.queued & self._bit and (self._reach is None or node.queued & self._spare_bit):
            return
        if not self._can_go(node):
            return
        num_units = node.counts[self._plane.index]
        if self._reach is not None:
            num_units = min(num_units, self._reach + NEAR)  # the value of its end
            if not node.queued & self._spare_bit:
                node.queued |= self._spare_bit
                self._spare.push(self._used(node), node, 0)
        if not node.queued & self._bit:
            node.queued |= self._bit
            self._queue_of(node).push(self._used(node), node, num_units)

    def mark_ended(self, mark: PrefixMark) -> None:
        """Queue its nodes by their use again."""
        queue = self._marked.pop(mark, None)
        for _, _, node, _ in () if queue is None else queue.entries:
            node.queued &= ~self._bit
        for node in mark.nodes:  # all of them: nodes that the mark protected may be spare now
            self.offer(node)

    def mark_replaced(self, node: Node, old: PrefixMark) -> None:
        """`node` has a newer mark than the one it was queued by."""
        queue = self._marked.get(old)
        if queue is not None and queue.remove(node):
            node.queued &= ~self._bit
            self.offer(node)

    def evict(self, count: int) -> None:
        """Free at least `count` cached units; the caller has checked that there are as many."""
        # Counts free units, because losing one page may remove others.
        target = self._pool.num_free + count
        if self._reach is not None:
            self._spare_some(target)
        while self._pool.num_free < target:
            queue, most = self._next(target - self._pool.num_free)
            node = queue.pop()
            node.queued &= ~self._bit
            places = self.loose(node, most)
            if self._teaches and len(places):
                self._teach(node, places)
            if queue is self._kept:
                self._pool.total_evicted_forks += len(places)
            self._index.remove(node, self._plane.index, places)

    @property
    def next_use(self) -> tuple[int, bool] | None:
        """When what goes next was last used, and whether it is a fork; None if nothing can go, or
        only what is marked."""
        others, kept = self._head(self._others), self._head(self._kept)
        if kept is None:
            return None if others is None else (others[0], False)
        if others is None or (self._excess() > 0 and kept[:2] < others[:2]):
            return kept[0], True
        return others[0], False

    def next_nodes(self, count: int) -> list[Node]:
        """Nodes whose units would go next, up to `count` units; changes nothing."""
        nodes: list[Node] = []
        for node in self.in_order(LOOK_AHEAD):
            if count <= 0:
                break
            nodes.append(node)
            count -= node.counts[self._plane.index]
        return nodes

    def in_order(self, most_entries: int) -> Iterator[Node]:
        """Nodes in eviction order, for this many entries of the queues; changes nothing."""
        others, kept = self._others.in_order(), self._kept.in_order()
        ahead = heapq.merge(others, kept) if self._excess() > 0 else chain(others, kept)
        for _, _, node, _ in islice(ahead, most_entries):
            if self._can_go(node):
                yield node

    def loose(self, node: Node, count: int) -> Indices:
        """Pages of a node whose units can go, ascending: the `count` that should go first."""
        units, holders = node.units[self._plane.index], self._pool.holders
        if self._is_ordered:
            # Units and holders form prefixes, so the loose units are at the end.
            end = node.counts[self._plane.index]
            first = max(0, end - count)
            num_held = int(np.count_nonzero(holders[units[first:end]]))
            return np.arange(first + num_held, end)
        places: Indices = (units != ABSENT).nonzero()[0]
        places = places[holders[units[places]] == 0]
        return places[-count:] if self._takes_ends else places[:count]

    def spare(self, node: Node) -> Indices:
        """Pages of a node that no lease holds and that are not near a resume point."""
        assert self._reach is not None
        is_spare = node.units[self._plane.index] != ABSENT
        ends = self._turns.places(node, self._reach + NEAR)
        for end in (*ends, node.end) if node.is_marked else ends:
            first = max(0, end - node.first - self._reach - NEAR)
            is_spare[first : max(0, end - node.first)] = False
        places: Indices = is_spare.nonzero()[0]
        is_loose: Bools = self._pool.holders[node.units[self._plane.index][places]] == 0
        return places[is_loose]

    def has_spare(self, node: Node, units: list[int], holders: list[int]) -> bool:
        """For audits: whether `spare` gives any page. `units`, `holders`: of the node's pages."""
        assert self._reach is not None
        near = self._reach + NEAR
        ends = self._turns.places(node, near)
        if node.is_marked:
            ends.append(node.end)
        return any(
            unit != ABSENT and not num_holders
            and not any(end - near <= page < end for end in ends)
            for page, (unit, num_holders) in enumerate(zip(units, holders, strict=True), node.first)
        )  # fmt: skip

    def _spare_some(self, target: int) -> None:
        """Free spare units until this many units are free or none is left."""
        if self._turns_version != self._turns.version:
            self._turns_version = self._turns.version
            for _, _, node, _ in (*self._others.entries, *self._kept.entries):
                self.offer(node)
        while self._pool.num_free < target and self._spare.entries:
            last_used, _, node, _ = self._spare.entries[0]
            self._spare.pop()
            node.queued &= ~self._spare_bit
            if not self._can_go(node):
                continue
            if self._used(node) != last_used:
                self.offer(node)
                continue
            places = self.spare(node)
            self._index.remove(node, self._plane.index, places[: target - self._pool.num_free])

    def _next(self, count: int) -> tuple[Queue, int]:
        """The queue whose head goes next, and the most units to take from it."""
        others, kept = self._head(self._others), self._head(self._kept)
        while others is None and kept is None and self._marked:
            weakest = min(self._marked, key=lambda mark: (mark.priority, mark.serial))
            if self._plane.tier is not Tier.HOST:
                self.end_mark(weakest)
            elif self._head(self._marked[weakest]) is not None:
                # The device has these pages while their mark lasts: only the copy is lost.
                return self._marked[weakest], count
            else:
                del self._marked[weakest]
            others, kept = self._head(self._others), self._head(self._kept)
        if kept is None:
            return self._others, count
        if others is None:
            return self._kept, count
        excess = self._excess()
        if excess > 0 and kept[:2] < others[:2]:
            return self._kept, min(count, excess)
        return self._others, count

    def _head(self, queue: Queue) -> QueueEntry | None:
        """A queue's first valid entry; outdated ones are removed."""
        while queue.entries:
            entry = queue.entries[0]
            node = entry[2]
            is_true = self._used(node) == entry[0] and self._queue_of(node) is queue
            if is_true and self._can_go(node):
                return entry
            queue.pop()
            node.queued &= ~self._bit
            self.offer(node)
        return None

    def _queue_of(self, node: Node) -> Queue:
        if node.mark is not None and not node.mark.is_over:
            return self._marked.setdefault(node.mark, Queue())
        return self._kept if node.is_fork and self._forks is not None else self._others

    def _excess(self) -> int:
        """Units of forks beyond their share."""
        if self._forks is None:
            return 0
        return self._kept.num_units - int(self._forks.share * self._pool.num_units)

    def _teach(self, node: Node, places: Indices) -> None:
        """Pages at the end of a node are about to go: would LRU have chosen others?"""
        assert self._forks is not None
        used, kept = node.last_used, self._kept
        if node.is_fork or not kept.entries or kept.entries[0][0] > used:
            self._forks.evicted(used)
            return
        first = int(places[0])
        before = node if first or node.parent is None else node.parent
        page = node.keys[first * self._page_bytes : (first + 1) * self._page_bytes]
        name = name_of(before.serial, node.owner, page)
        self._forks.evicted_early(name, used, len(places), kept.num_units)

    def _used(self, node: Node) -> int:
        """A unit that has just arrived on the host is not evicted first there (H07)."""
        last_used = node.last_used if self._reach is None else node.last_resumed
        return max(last_used, node.last_arrived) if self._counts_arrivals else last_used

    def _can_go(self, node: Node) -> bool:
        plane = self._plane.index
        return (
            node.is_attached
            and node.counts[plane] > 0
            and not (self._is_ordered and node.below[plane])
        )


class Allocator:
    """Allocates units: free ones first, then evicted ones."""

    def __init__(self, index: Index, evictors: list[Evictor]) -> None:
        self._pools = index.pools
        self._evictors = evictors
        self.has_allocated = False
        """Whether units were allocated since the caller last reset it."""

    def allocate(self, plane: int, count: int) -> Units:
        """Hold this many units; the caller has checked that they are available."""
        self.has_allocated = True
        self.make_room(plane, count)
        return self._pools[plane].take(count)

    def make_room(self, plane: int, count: int) -> None:
        """Evict until this many units are free."""
        pool = self._pools[plane]
        if count > pool.num_free:
            self._evictors[plane].evict(count - pool.num_free)
