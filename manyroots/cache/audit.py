"""One function per invariant of the cache; each raises AssertionError with the violation.

For tests and the simulator, which call `audit` after every step. Reads everything, O(units), as
plain lists (`AuditView`): the caches of tests are small, and each numpy call would cost more than
its computation.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress

from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.cache.planes import ABSENT, Plane
from manyroots.cache.tree import TOKEN_BYTES, Node, PathHold
from manyroots.ids import HASH_BYTES, Tier


class AuditedPool:
    """A plane's pool as lists."""

    def __init__(self, cache: PrefixCache, plane: Plane) -> None:
        self.plane = plane
        self.pool = cache.index.pools[plane.index]
        self.holders: list[int] = self.pool.holders.tolist()
        self.indexed: list[bool] = self.pool.indexed.tolist()
        self.free: list[int] = self.pool.free_units().tolist()
        # Absent units are -1, which indexes the last entry of this list.
        self.by_unit = [*self.holders, 0].__getitem__

    @property
    def where(self) -> str:
        return f"{self.plane.family.name} on {self.plane.tier.value}"


class AuditedNode:
    """A node's units as lists, by plane."""

    def __init__(self, node: Node, pools: list[AuditedPool]) -> None:
        self.node = node
        self.units: list[list[int]] = []
        self.counts: list[int] = []
        """Pages that have a unit."""
        self.holders: list[list[int]] = []
        """Holders of each page's unit; 0 if there is none."""
        self.num_loose: list[int] = []
        """Units without a holder."""
        for array, pool in zip(node.units, pools, strict=True):
            units = array.tolist()
            holders = list(map(pool.by_unit, units))
            num_absent = units.count(ABSENT)
            self.units.append(units)
            self.counts.append(len(units) - num_absent)
            self.holders.append(holders)
            self.num_loose.append(holders.count(0) - num_absent)


class AuditView:
    """The cache as lists, read once."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.planes = cache.layout.planes
        self.is_ordered = [plane.is_ordered for plane in self.planes]
        self.pools = [AuditedPool(cache, plane) for plane in self.planes]
        self.nodes = [AuditedNode(node, self.pools) for node in cache.index.tree.nodes()]
        """Parents first."""


def audit(cache: PrefixCache) -> None:
    """Every invariant."""
    view = AuditView(cache)
    units_balance(view)
    holders_are_leases_transfers_and_keeps(view)
    path_holds_are_true(view)
    free_units_have_no_owner(view)
    nodes_are_linked(view)
    namespaces_know_where_they_begin(view)
    first_pages_are_counted(view)
    owners_take_over_once(view)
    queues_are_true(view)
    index_is_the_tree(view)
    counts_are_true(view)
    pages_are_supported(view)
    held_units_have_held_units_above(view)
    device_units_have_no_holes(view)
    loose_units_are_queued(view)
    spare_units_are_queued(view)


def units_balance(view: AuditView) -> None:
    """Ledger H10: free + cached + held = total, on every plane."""
    for each in view.pools:
        pool, holders, where = each.pool, each.holders, each.where
        assert len(holders) == pool.num_units + pool.num_lent, where
        lent = set(pool.lent_units().tolist())
        assert len(lent) == pool.num_lent, f"{where}: a unit is lent twice"
        assert not lent & set(pool.free_units().tolist()), f"{where}: a lent unit is free"
        assert not any(holders[u] or each.indexed[u] for u in lent), f"{where}: a lent unit is used"
        assert min(holders) >= 0, f"{where}: a unit has fewer than no holders"
        held = len(holders) - holders.count(0)
        cached = list(zip(holders, each.indexed, strict=True)).count((0, True))
        assert pool.num_cached == cached, f"{where}: num_cached {pool.num_cached} is {cached}"
        assert pool.num_held == held, f"{where}: num_held {pool.num_held} is {held}"
        assert pool.num_free + cached + held == pool.num_units, where


def holders_are_leases_transfers_and_keeps(view: AuditView) -> None:
    cache = view.cache
    counted = [[0] * len(pool.holders) for pool in view.pools]
    for lease in cache.open_leases.values():
        _count_lease(cache, lease, counted)
    for path in _path_holds(cache):
        _count(counted[0], path.units.tolist())
    for move in cache.transfers.moves():
        _count(counted[move.source.index], move.source_units.tolist())
        _count(counted[move.source.index], move.path.tolist())
        if move.target is not None:
            _count(counted[move.target.index], move.target_units.tolist())
    for ticket in cache.prefetcher.tickets():
        for plane, units in ticket.units.values():
            _count(counted[plane.index], units.tolist())
    for keep in cache.keeper.open:
        for plane_index, units in keep.units.items():
            assert view.planes[plane_index].tier is Tier.HOST, "a waiting one keeps device"
            _count(counted[plane_index], units.tolist())
    for pool, held in zip(view.pools, counted, strict=True):
        assert held == pool.holders, f"{pool.where}: holders {pool.holders}, counted {held}"


def _count(holders: list[int], units: list[int]) -> None:
    for unit in units:
        assert unit >= 0, "a holder of no unit"
        holders[unit] += 1


def _count_lease(cache: PrefixCache, lease: Lease, counted: list[list[int]]) -> None:
    for plane in cache.layout.device:
        if not plane.family.is_state:
            table = lease.tables[plane.index].tolist()
            held = [unit for unit in table if unit != ABSENT]
            assert len(set(held)) == len(held), "a lease holds a unit twice"
            dead = table[: lease.first_live[plane.index]]
            assert dead.count(ABSENT) == len(dead), "a unit before the window is held"
            if lease.path_hold is not None:
                shared = lease.path_hold.units.tolist()
                assert table[: len(shared)] == shared, "a lease shares a hold on another path"
                held = table[len(shared) :]
            _count(counted[plane.index], held)
    for family, unit in (*lease.states.items(), *lease.resumed.items()):
        _count(counted[family], [unit])
    for checkpoint in lease.checkpoints:
        _count(counted[checkpoint.family], [checkpoint.unit])
    for plane_index, duplicates in lease.duplicates:
        _count(counted[plane_index], duplicates.tolist())
    for family, _, unit in lease.onboarding:
        _count(counted[cache.layout.host[family].index], [unit])


def _path_holds(cache: PrefixCache) -> Counter[PathHold]:
    leases = cache.open_leases.values()
    return Counter(lease.path_hold for lease in leases if lease.path_hold is not None)


def path_holds_are_true(view: AuditView) -> None:
    """A hold that a lookup may share is on the path that the tree has now."""
    counts = _path_holds(view.cache)
    for path, count in counts.items():
        assert path.num_leases == count, "leases of a path are counted wrongly"
    for each in view.nodes:
        node, held = each.node, each.node.path_hold
        if held is not None:
            assert counts[held], "a hold of no lease"
            assert held.node is node, "a hold of another node"
            assert node.first < held.depth <= node.end, "a hold does not end in its node"
            units = view.cache.index.units_above(node, held.depth, 0)
            assert set(units.tolist()) == set(held.units.tolist()), "a hold on another path"


def free_units_have_no_owner(view: AuditView) -> None:
    for each in view.pools:
        free = each.free
        assert len(set(free)) == each.pool.num_free == len(free), "a unit is free twice"
        for unit in free:
            assert not each.holders[unit], "a free unit is held"
            assert not each.indexed[unit], "a free unit is indexed"


def index_is_the_tree(view: AuditView) -> None:
    for plane, pool in enumerate(view.pools):
        found = [unit for each in view.nodes for unit in each.units[plane] if unit != ABSENT]
        indexed = set(compress(range(len(pool.indexed)), pool.indexed))
        assert len(set(found)) == len(found), "the tree leads to a unit twice"
        assert set(found) == indexed, "tree and flags disagree"


def nodes_are_linked(view: AuditView) -> None:
    page_bytes = view.cache.page_size * TOKEN_BYTES
    for each in view.nodes:
        node = each.node
        assert node.is_attached
        assert node.parent is not None
        assert node.owner is not None
        assert node.num_pages > 0, "an empty node"
        assert node.end == node.first + node.num_pages, "a node does not end where its pages do"
        assert len(node.keys) == node.num_pages * page_bytes
        assert len(node.hashes) in (0, node.num_pages * HASH_BYTES), "a page without its hash"
        for units in each.units:
            assert len(units) == node.num_pages
        assert node.first == node.parent.end, "a node does not begin where its parent ends"
        assert node.parent.children[(node.owner, node.keys[:page_bytes])] is node


def counts_are_true(view: AuditView) -> None:
    for each in view.nodes:
        assert each.node.counts == each.counts, "a node's count is wrong"
    for node in (view.cache.index.tree.root, *(each.node for each in view.nodes)):
        children = node.children.values()
        for plane, below in enumerate(node.below):
            count = sum([1 for child in children if child.counts[plane]]) if children else 0
            assert below == count, "a node's count of children is wrong"


def pages_are_supported(view: AuditView) -> None:
    """H08: if a family is ordered, no page lacks a unit that it needs."""
    layout = view.cache.layout
    if any(plane.family.is_ordered for plane in layout.device):
        spine = [plane.index for plane in layout.spine]
        bare = (ABSENT,) * len(spine)
        for each in view.nodes:
            pages = zip(*(each.units[plane] for plane in spine), strict=True)
            assert bare not in pages, "a page that nothing can resume through"


def held_units_have_held_units_above(view: AuditView) -> None:
    """Together with `device_units_have_no_holes`: up to the root."""
    for plane, is_ordered in enumerate(view.is_ordered):
        if is_ordered:
            holders = {id(each.node): each.holders[plane] for each in view.nodes}
            assert not _follows_a_gap(view, holders, 0), "a held unit lies below a loose one"


def device_units_have_no_holes(view: AuditView) -> None:
    """An ordered family's device units have device units above them, up to the root."""
    for plane in view.cache.layout.device:
        if plane.family.is_ordered:
            units = {id(each.node): each.units[plane.index] for each in view.nodes}
            assert not _follows_a_gap(view, units, ABSENT), "a hole in an ordered family"


def _follows_a_gap(view: AuditView, pages: dict[int, list[int]], gap: int) -> bool:
    """Whether a page follows a gap in its node or its parent. `pages`: by node, a number for each
    page; `gap` is the number of a gap."""
    for each in view.nodes:
        own = pages[id(each.node)]
        before = pages.get(id(each.node.parent))
        if own[0] != gap and before is not None and before[-1] == gap:
            return True
        num_gaps = own.count(gap)
        if num_gaps and own[-num_gaps:].count(gap) < num_gaps:
            return True
    return False


def loose_units_are_queued(view: AuditView) -> None:
    """The evictor will find everything that counts as available."""
    for each in view.nodes:
        node = each.node
        for plane, num_loose in enumerate(each.num_loose):
            if num_loose and not node.queued >> plane & 1:
                is_tail = not (view.is_ordered[plane] and node.below[plane])
                assert not is_tail, f"loose units not up for eviction: {view.planes[plane]}"


def spare_units_are_queued(view: AuditView) -> None:
    """The evictor will find spare units before all others."""
    for plane, evictor in zip(view.planes, view.cache.evictors, strict=True):
        if plane.family.reach is None or not evictor.is_up_to_date:
            continue
        _, (spare_bit, _) = evictor.queues
        for each in view.nodes:
            if each.num_loose[plane.index] and not each.node.queued & spare_bit:
                assert not len(evictor.spare(each.node)), (
                    f"units that can be spared are not up for it: {plane}"
                )


def queues_are_true(view: AuditView) -> None:
    """A node is in the queue that its plane's bits name, and a queue's units are counted."""
    for plane, evictor in zip(view.planes, view.cache.evictors, strict=True):
        for bit, queues in evictor.queues:
            queued = []
            for queue in queues:
                units = 0
                for _, _, node, num_units in queue.entries:
                    units += num_units
                    if node.is_attached:
                        queued.append(id(node))
                assert units == queue.num_units, f"a queue's units are counted wrongly: {plane}"
            marked = {id(each.node) for each in view.nodes if each.node.queued & bit}
            assert len(queued) == len(marked), f"a node is queued twice, or not at all: {plane}"
            assert set(queued) == marked, f"a node is not in its queue: {plane}"
    if view.cache.forks is not None:
        view.cache.forks.audit()


def first_pages_are_counted(view: AuditView) -> None:
    """S07: the count of first pages in other namespaces is correct."""
    tree = view.cache.index.tree
    counted = Counter((owner.namespace.salt, page) for owner, page in tree.root.children)
    assert counted == tree.first_pages, "the count of first pages is wrong"


def namespaces_know_where_they_begin(view: AuditView) -> None:
    nodes = [each.node for each in view.nodes]
    begins = {n.serial for n in nodes if n.parent and n.parent.namespace != n.namespace}
    known = {serial for starts in view.cache.index.tree.by_namespace.values() for serial in starts}
    assert begins == known, "the index of namespaces is wrong"


def owners_take_over_once(view: AuditView) -> None:
    """N22, N23: owners change from base to an adapter and never back, within one tenant. If an
    adapter starts inside a page, that page is a separate node."""
    for each in view.nodes:
        node = each.node
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
