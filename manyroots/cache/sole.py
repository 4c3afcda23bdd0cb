"""The fast path for one family that keeps every page on the device only: the most common cache.

Collects every simplification of that case: a page in the tree is always there, a holder of a page
holds all pages before it, and only ends of paths are ever loose. The parts have the interface of
the general ones. The cache chooses between the two when it is made; no other code knows.
"""

from __future__ import annotations

from manyroots.cache.costs import Costs
from manyroots.cache.eviction import Allocator, Evictor
from manyroots.cache.fork_share import ForkShare, name_of
from manyroots.cache.growth import Growth, behind_drafts
from manyroots.cache.holding import Holder
from manyroots.cache.index import Index
from manyroots.cache.lease import Lease
from manyroots.cache.matching import Limit, Match, path_units
from manyroots.cache.outcomes import Extension, Refusal
from manyroots.cache.planes import Units
from manyroots.cache.publishing import Publisher, nearest_attached
from manyroots.cache.states import States
from manyroots.cache.tree import Node, PathHold, Walk
from manyroots.ids import StepId
from manyroots.step import Int32s


class SoleHolder(Holder):
    """A page in the tree is always there."""

    def __init__(self, index: Index, costs: Costs, *, reuse: bool) -> None:
        super().__init__(index, costs, reuse=reuse)
        self._plane = index.layout.device[0]
        self._pool = index.pools[0]

    def match(self, nodes: list[Node], depth: int, limit: Limit) -> Match:
        return Match(Walk(nodes, depth), depth, depth, limit)

    def hold(self, lease: Lease, nodes: list[Node], depth: int, tokens: Int32s) -> int:
        node = nodes[-1]
        held = node.path_hold
        if held is None or held.depth != depth:
            # No copy: a unit in the tree is not written again.
            units = path_units(nodes, depth, self._plane)
            self._pool.hold(units, node.is_fork)
            held = PathHold(node, units)
            if node.path_hold is None:
                node.path_hold = held
        held.num_leases += 1
        lease.path_hold = held
        lease.tables[0] = held.units
        return depth

    def num_resumable_tokens(self, lease: Lease, tokens: Int32s) -> int:
        num_pages = min(lease.num_published_pages, nearest_attached(lease.cursor).end)
        return num_pages * self._page_size

    def give_back(self, lease: Lease) -> None:
        held, units = lease.path_hold, lease.tables[0]
        if held is not None:
            held.num_leases -= 1
            if held.num_leases:
                units = units[held.depth :]
            elif held.node.path_hold is held:
                held.node.path_hold = None
        self._pool.drop(units)


class SoleGrowth(Growth):
    """The position of a lease does not affect how it grows."""

    def __init__(
        self, index: Index, allocator: Allocator, states: States, publisher: Publisher
    ) -> None:
        super().__init__(index, allocator, states, publisher)
        self._pool = index.pools[0]

    def clip(self, lease: Lease, num_computed: int, num_tokens: int) -> int:
        return num_tokens

    def can_reach(
        self, lease: Lease, num_computed: int, num_tokens: int, num_step_tokens: int
    ) -> bool:
        need = -(-num_tokens // self._page_size) - len(lease.tables[0])
        return need <= self._pool.num_free + self._pool.num_cached

    def extend(
        self,
        lease: Lease,
        num_computed: int,
        num_tokens: int,
        step_id: StepId,
        most_tokens: int = 0,
    ) -> Extension | Refusal:
        if lease.num_sure_tokens is not None:
            raise behind_drafts(lease)
        pool, first = self._pool, len(lease.tables[0])
        num_pages = -(-num_tokens // self._page_size)
        if num_tokens < most_tokens and num_pages - first < pool.num_free:
            num_pages = num_tokens // self._page_size + 1
        need = num_pages - first
        if need > 0:
            if need > pool.num_free:
                if need > pool.num_free + pool.num_cached:
                    return Refusal.NO_ROOM
                self._allocator.make_room(0, need)
            lease.grow(0, pool.take_view(need))
        lease.num_covered_tokens = num_pages * self._page_size
        return (first,)

    def next_pages(self, leases: list[Lease]) -> list[Units] | None:
        if len(leases) > self._pool.num_available:
            return None
        units = self._allocator.allocate(0, len(leases))
        for lease, unit in zip(leases, units.tolist(), strict=True):
            lease.grow_by_one(0, unit)
            lease.num_covered_tokens += self._page_size
        return [units]


class SolePublisher(Publisher):
    """Nearly everything to publish comes after the last page, where no other request has
    published."""

    def __init__(
        self, index: Index, evictors: list[Evictor], forks: ForkShare | None, *, reuse: bool
    ) -> None:
        super().__init__(index, evictors, forks, reuse=reuse)
        self._evictor = evictors[0]

    def touch(self, node: Node, end: int) -> None:
        # Only ends of paths are evicted; when one is evicted, its parent inherits this.
        node.last_used = self._tick = self._tick + 1

    def offer_path(self, node: Node) -> None:
        self._evictor.offer(node)

    def publish(
        self, lease: Lease, tokens: Int32s, num_full: int, step_id: StepId, lengthen: bool
    ) -> list[Node]:
        leaf = self._simply(lease, tokens, num_full, step_id, lengthen)
        if leaf is not None:
            return [leaf]
        return super().publish(lease, tokens, num_full, step_id, lengthen)

    def _simply(
        self, lease: Lease, tokens: Int32s, end: int, step_id: StepId, lengthen: bool
    ) -> Node | None:
        """Publish pages after the last one. None if the case is not so simple."""
        cursor, first = lease.cursor, lease.num_published_pages
        if end <= first or cursor.end != first or not cursor.is_attached:
            return None
        if end > lease.num_allowed_pages:
            return None
        owner, run_end = lease.key.first_run
        if first >= run_end:
            owner, run_end = lease.key.run_at(first)
        if end > run_end:
            return None
        keys = tokens[first * self._page_size : end * self._page_size].tobytes()
        page = lease.ahead
        if page is None:  # it has published before, or had found all there was to find
            page = (owner, keys[: self._page_bytes])
        if page in cursor.children:
            return None
        leaf, units = cursor, lease.tables[0][first:end]
        if lengthen and cursor.may_grow and cursor.owner == page[0]:
            self._index.lengthen(cursor, keys, units)
        else:
            leaf = self._index.add_leaf(cursor, page, keys, units, step_id)
            if self._forks is not None and self._forks.early:
                self._forks.published(name_of(cursor.serial, *page))
        leaf.last_used = self._tick = self._tick + 1
        lease.cursor, lease.num_published_pages, lease.ahead = leaf, end, None
        return leaf

    def _mark_end(self, path: list[Node], boundary: int) -> None:
        pass  # any page in the tree can be resumed from
