"""One function per invariant of the cache; each raises AssertionError saying what is wrong.

For tests and the simulator, which call `audit` after every step. Reads everything, O(units), but
walks the tree once: what is checked page by page is checked on arrays of all pages (`View`).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from manyroots.cache.cache import PrefixCache
from manyroots.cache.keys import HASH_BYTES
from manyroots.cache.lease import Lease
from manyroots.cache.planes import ABSENT, Plane, Units
from manyroots.cache.tree import TOKEN_BYTES, Node
from manyroots.ids import Tier
from manyroots.step import Bools

Int64s = npt.NDArray[np.int64]


class View:
    """The tree as arrays: for each plane one of all pages, node after node, parents first."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.nodes = list(cache.index.tree.nodes())
        numbers = {id(node): number for number, node in enumerate(self.nodes)}
        self.parents: Int64s = np.array([numbers.get(id(n.parent), -1) for n in self.nodes], int)
        """The number of each node's parent; -1 for the root."""
        sizes: Int64s = np.array([node.num_pages for node in self.nodes], int)
        self.ends: Int64s = np.cumsum(sizes)
        self.starts: Int64s = self.ends - sizes
        self.is_first = np.zeros(int(sizes.sum()), np.bool_)
        """For each page, whether its node begins there."""
        self.is_first[self.starts[sizes > 0]] = True

        self._units: dict[int, Units] = {}

    def units(self, plane: Plane) -> Units:
        """The unit of every page."""
        units = self._units.get(plane.index)
        if units is None:
            units = np.concatenate([node.units[plane.index] for node in self.nodes])
            self._units[plane.index] = units
        return units

    def by_node(self, marks: Bools) -> Int64s:
        """For each node, how many of its pages are marked."""
        before = np.concatenate(([0], np.cumsum(marks)))
        return before[self.ends] - before[self.starts]

    def holders(self, plane: Plane) -> Int64s:
        """How many hold each page's unit; 0 where there is none."""
        units = self.units(plane)
        return np.where(units == ABSENT, 0, self.cache.index.pools[plane.index].holders[units])


def audit(cache: PrefixCache) -> None:
    """Every invariant."""
    units_balance(cache)
    holders_are_leases_transfers_and_keeps(cache)
    free_units_are_nobodys(cache)
    view = View(cache)
    nodes_are_linked(view)
    namespaces_know_where_they_begin(view)
    first_pages_are_counted(view)
    owners_take_over_once(view)
    queues_are_true(view)
    if not view.nodes:
        nothing_is_indexed(cache)
        return
    index_is_the_tree(view)
    counts_are_true(view)
    pages_are_supported(view)
    held_units_have_held_units_above(view)
    device_units_have_no_holes(view)
    loose_units_are_queued(view)
    spare_units_are_queued(view)


def units_balance(cache: PrefixCache) -> None:
    """Ledger H10: free + cached + held = total, on every plane."""
    for plane, pool in zip(cache.layout.planes, cache.index.pools, strict=True):
        held = int(np.count_nonzero(pool.holders > 0))
        cached = int(np.count_nonzero((pool.holders == 0) & pool.indexed))
        where = f"{plane.family.name} on {plane.tier.value}"
        assert not np.count_nonzero(pool.holders < 0), f"{where}: a unit has fewer than no holders"
        assert pool.num_cached == cached, f"{where}: num_cached {pool.num_cached} is {cached}"
        assert pool.num_held == held, f"{where}: num_held {pool.num_held} is {held}"
        assert pool.num_free + cached + held == pool.num_units, where


def holders_are_leases_transfers_and_keeps(cache: PrefixCache) -> None:
    counted: list[list[int]] = [[] for _ in cache.layout.planes]
    for lease in cache.open_leases.values():
        _count_lease(cache, lease, counted)
    for move in cache.transfers.moves():
        counted[move.source.index] += move.source_units.tolist() + move.path.tolist()
        if move.target is not None:
            counted[move.target.index] += move.target_units.tolist()
    for ticket in cache.prefetcher.tickets():
        for plane, units in ticket.units.values():
            counted[plane.index] += units.tolist()
    for keep in cache.keeper.open:
        for plane_index, units in keep.units.items():
            assert cache.layout.planes[plane_index].tier is Tier.HOST, "a waiting one keeps device"
            counted[plane_index] += units.tolist()
    for plane, pool, held in zip(cache.layout.planes, cache.index.pools, counted, strict=True):
        count = np.bincount(np.array(held, int), minlength=pool.num_units)
        wrong = np.flatnonzero(count != pool.holders)
        assert not len(wrong), (
            f"{plane}: units {wrong} have holders {pool.holders[wrong]}, counted {count[wrong]}"
        )


def _count_lease(cache: PrefixCache, lease: Lease, counted: list[list[int]]) -> None:
    for plane in cache.layout.device:
        if not plane.family.is_state:
            table = lease.tables[plane.index].tolist()
            held = [unit for unit in table if unit != ABSENT]
            assert len(set(held)) == len(held), "a lease holds a unit twice"
            dead = table[: lease.first_live[plane.index]]
            assert all(unit == ABSENT for unit in dead), "a unit behind the window is held"
            counted[plane.index] += held
    for family, unit in (*lease.states.items(), *lease.resumed.items()):
        counted[family].append(unit)
    for checkpoint in lease.checkpoints:
        counted[checkpoint.family].append(checkpoint.unit)
    for plane_index, duplicates in lease.duplicates:
        counted[plane_index] += duplicates.tolist()
    for family, _, unit in lease.onboarding:
        counted[cache.layout.host[family].index].append(unit)


def free_units_are_nobodys(cache: PrefixCache) -> None:
    for pool in cache.index.pools:
        free = pool.free_units()
        is_free = np.zeros(pool.num_units, np.bool_)
        is_free[free] = True
        assert np.count_nonzero(is_free) == pool.num_free == len(free), "a unit is free twice"
        assert not np.count_nonzero(pool.holders[free]), "a free unit is held"
        assert not np.count_nonzero(pool.indexed[free]), "a free unit is indexed"


def nothing_is_indexed(cache: PrefixCache) -> None:
    """The tree is empty: no unit counts as findable."""
    for pool in cache.index.pools:
        assert not np.count_nonzero(pool.indexed), "tree and flags disagree"
    root = cache.index.tree.root
    assert not any(root.below), "a node's count of children is wrong"


def index_is_the_tree(view: View) -> None:
    for plane in view.cache.layout.planes:
        pool, units = view.cache.index.pools[plane.index], view.units(plane)
        # Moved up by one: what is absent counts as unit -1, of which there are any number.
        count = np.bincount(units + 1, minlength=pool.num_units + 1)[1:]
        assert count.max() <= 1, "the tree leads to a unit twice"
        assert not np.count_nonzero(count != pool.indexed), "tree and flags disagree"


def nodes_are_linked(view: View) -> None:
    page_bytes = view.cache.page_size * TOKEN_BYTES
    for node in view.nodes:
        assert node.is_attached
        assert node.parent is not None
        assert node.owner is not None
        assert node.num_pages > 0, "an empty node"
        assert node.end == node.first + node.num_pages, "a node does not end where its pages do"
        assert len(node.keys) == node.num_pages * page_bytes
        assert len(node.hashes) in (0, node.num_pages * HASH_BYTES), "a page without its hash"
        assert {*map(len, node.units)} == {node.num_pages}
        assert node.first == node.parent.end, "a node does not begin where its parent ends"
        assert node.parent.children[(node.owner, node.keys[:page_bytes])] is node


def counts_are_true(view: View) -> None:
    root = view.cache.index.tree.root
    for plane in view.cache.layout.planes:
        counts = view.by_node(view.units(plane) != ABSENT)
        own = np.array([node.counts[plane.index] for node in view.nodes])
        assert np.array_equal(own, counts), "a node's count is wrong"
        # Moved up by one, so that the root's children are counted too.
        below = np.bincount(view.parents[counts > 0] + 1, minlength=len(view.nodes) + 1)
        own = np.array([node.below[plane.index] for node in (root, *view.nodes)])
        assert np.array_equal(own, below), "a node's count of children is wrong"


def pages_are_supported(view: View) -> None:
    """H08: no page without a unit it can't do without, where a family is ordered."""
    layout = view.cache.layout
    if any(plane.family.is_ordered for plane in layout.device):
        is_supported = np.zeros(len(view.is_first), np.bool_)
        for plane in layout.spine:
            is_supported |= view.units(plane) != ABSENT
        assert not np.count_nonzero(~is_supported), "a page that nothing can resume through"


def held_units_have_held_units_above(view: View) -> None:
    """With `device_units_have_no_holes`: all the way up."""
    for plane in view.cache.layout.planes:
        if plane.is_ordered:
            assert not _follows_a_gap(view, view.holders(plane) > 0), (
                "a held unit lies below a loose one"
            )


def device_units_have_no_holes(view: View) -> None:
    """An ordered family's device units have device units above them, all the way."""
    for plane in view.cache.layout.device:
        if plane.family.is_ordered:
            assert not _follows_a_gap(view, view.units(plane) != ABSENT), (
                "a hole in an ordered family"
            )


def _follows_a_gap(view: View, marks: Bools) -> bool:
    """Whether a marked page comes behind one, in its node or its parent, that is not."""
    within = marks[1:] & ~marks[:-1] & ~view.is_first[1:]
    behind_parents = view.parents >= 0
    firsts = marks[view.starts[behind_parents]]
    lasts = marks[view.ends[view.parents[behind_parents]] - 1]
    return bool(np.count_nonzero(within) or np.count_nonzero(firsts & ~lasts))


def loose_units_are_queued(view: View) -> None:
    """What counts as available will be found by the evictor."""
    for plane in view.cache.layout.planes:
        is_loose = (view.units(plane) != ABSENT) & (view.holders(plane) == 0)
        for number in np.flatnonzero(view.by_node(is_loose)).tolist():
            node: Node = view.nodes[number]
            is_tail = not (plane.is_ordered and node.below[plane.index])
            assert not is_tail or node.queued >> plane.index & 1, (
                f"loose units not up for eviction: {plane}"
            )


def spare_units_are_queued(view: View) -> None:
    """What can be spared will be found by the evictor before all else."""
    for plane, evictor in zip(view.cache.layout.planes, view.cache.evictors, strict=True):
        if plane.family.reach is None or not evictor.is_up_to_date:
            continue
        _, (spare_bit, _) = evictor.queues
        for node in view.nodes:
            assert node.queued & spare_bit or not len(evictor.spare(node)), (
                f"units that can be spared are not up for it: {plane}"
            )


def queues_are_true(view: View) -> None:
    """A node is in one queue of each plane that says so, and a queue's units are counted."""
    for plane, evictor in zip(view.cache.layout.planes, view.cache.evictors, strict=True):
        for bit, queues in evictor.queues:
            for queue in queues:
                units = sum(entry[3] for entry in queue.entries)
                assert units == queue.num_units, f"a queue's units are counted wrongly: {plane}"
            queued = [id(e[2]) for queue in queues for e in queue.entries if e[2].is_attached]
            marked = {id(node) for node in view.nodes if node.queued & bit}
            assert len(queued) == len(marked), f"a node is queued twice, or not at all: {plane}"
            assert set(queued) == marked, f"a node is not in its queue: {plane}"
    if view.cache.forks is not None:
        view.cache.forks.audit()


def first_pages_are_counted(view: View) -> None:
    """S07: who asks whether another namespace has a page is told the truth."""
    tree = view.cache.index.tree
    counted = Counter((owner.namespace.salt, page) for owner, page in tree.root.children)
    assert counted == tree.first_pages, "the count of first pages is wrong"


def namespaces_know_where_they_begin(view: View) -> None:
    begins = {n.serial for n in view.nodes if n.parent and n.parent.namespace != n.namespace}
    known = {serial for starts in view.cache.index.tree.by_namespace.values() for serial in starts}
    assert begins == known, "the index of namespaces is wrong"


def owners_take_over_once(view: View) -> None:
    """N22, N23: from base to an adapter and never back, for one tenant. Where an adapter begins
    inside a page, that page is a node of its own."""
    for node in view.nodes:
        owner, parent = node.owner, node.parent
        assert owner is not None
        assert parent is not None
        assert owner.namespace.adapter is not None or owner.begin == 0, "base begins in a page"
        assert 0 <= owner.begin < view.cache.page_size
        assert owner.begin == 0 or node.num_pages == 1, "an adapter begins in many pages"
        if parent.owner is not None:
            before = parent.owner.namespace
            assert before.salt == owner.namespace.salt, "a tenant's pages lie below another's"
            if owner.begin or before != owner.namespace:
                assert before.adapter is None, "an adapter's pages lie below another's"
