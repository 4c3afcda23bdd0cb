"""One function per invariant of the cache; each raises AssertionError saying what is wrong.

For tests and the simulator, which call `audit` after every step. Reads everything, O(units).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from manyroots.cache.cache import PrefixCache
from manyroots.cache.keys import HASH_BYTES
from manyroots.cache.planes import ABSENT
from manyroots.cache.tree import TOKEN_BYTES


def audit(cache: PrefixCache) -> None:
    """Every invariant."""
    units_balance(cache)
    holders_are_leases_and_transfers(cache)
    free_units_are_nobodys(cache)
    index_is_the_tree(cache)
    nodes_are_linked(cache)
    counts_are_true(cache)
    pages_are_supported(cache)
    held_units_have_held_units_above(cache)
    device_units_have_no_holes(cache)
    loose_units_are_queued(cache)
    namespaces_know_where_they_begin(cache)


def units_balance(cache: PrefixCache) -> None:
    """Ledger H10: free + cached + held = total, on every plane."""
    for plane, pool in zip(cache.layout.planes, cache.index.pools, strict=True):
        held = int((pool.holders > 0).sum())
        cached = int(((pool.holders == 0) & pool.indexed).sum())
        where = f"{plane.family.name} on {plane.tier.value}"
        assert (pool.holders >= 0).all(), f"{where}: a unit has fewer than no holders"
        assert pool.num_cached == cached, f"{where}: num_cached {pool.num_cached} is {cached}"
        assert pool.num_held == held, f"{where}: num_held {pool.num_held} is {held}"
        assert pool.num_free + cached + held == pool.num_units, where


def holders_are_leases_and_transfers(cache: PrefixCache) -> None:
    counted: list[Counter[int]] = [Counter() for _ in cache.layout.planes]
    for lease in cache.open_leases.values():
        for plane in cache.layout.device:
            if not plane.family.is_state:
                table = lease.tables[plane.index].tolist()
                held = [unit for unit in table if unit != ABSENT]
                assert len(set(held)) == len(held), "a lease holds a unit twice"
                dead = table[: lease.first_live[plane.index]]
                assert all(unit == ABSENT for unit in dead), "a unit behind the window is held"
                counted[plane.index].update(held)
        for family, unit in (*lease.states.items(), *lease.resumed.items()):
            counted[family][unit] += 1
        for checkpoint in lease.checkpoints:
            counted[checkpoint.family][checkpoint.unit] += 1
        for plane_index, copies in lease.copies:
            counted[plane_index].update(copies.tolist())
        for family, _, unit in lease.onboarding:
            counted[cache.layout.host[family].index][unit] += 1
    for move in cache.transfers.moves():
        counted[move.source.index].update(move.source_units.tolist())
        counted[move.source.index].update(move.path.tolist())
        if move.target is not None:
            counted[move.target.index].update(move.target_units.tolist())
    for ticket in cache.prefetcher.tickets():
        for plane, units in ticket.units.values():
            counted[plane.index].update(units.tolist())
    for plane, pool, count in zip(cache.layout.planes, cache.index.pools, counted, strict=True):
        actual = {int(u): int(pool.holders[u]) for u in pool.holders.nonzero()[0]}
        assert dict(count) == actual, f"{plane}: holders {actual}, counted {dict(count)}"


def free_units_are_nobodys(cache: PrefixCache) -> None:
    for pool in cache.index.pools:
        free = np.array(sorted(set(pool.free_units())), np.intp)
        assert len(free) == pool.num_free, "a unit is free twice"
        assert not pool.holders[free].any(), "a free unit is held"
        assert not pool.indexed[free].any(), "a free unit is indexed"


def index_is_the_tree(cache: PrefixCache) -> None:
    for plane, pool in enumerate(cache.index.pools):
        units = [int(u) for n in cache.index.tree.nodes() for u in n.units[plane] if u != ABSENT]
        assert len(set(units)) == len(units), "the tree leads to a unit twice"
        assert set(units) == set(pool.indexed.nonzero()[0].tolist()), "tree and flags disagree"


def nodes_are_linked(cache: PrefixCache) -> None:
    page_bytes = cache.page_size * TOKEN_BYTES
    for node in cache.index.tree.nodes():
        assert node.is_attached
        assert node.parent is not None
        assert node.namespace is not None
        assert node.num_pages > 0, "an empty node"
        assert len(node.keys) == node.num_pages * page_bytes
        assert len(node.hashes) in (0, node.num_pages * HASH_BYTES), "a page without its hash"
        assert all(len(units) == node.num_pages for units in node.units)
        assert node.first == node.parent.end, "a node does not begin where its parent ends"
        assert node.parent.children[(node.namespace, node.keys[:page_bytes])] is node


def counts_are_true(cache: PrefixCache) -> None:
    tree = cache.index.tree
    for node in (tree.root, *tree.nodes()):
        for plane, units in enumerate(node.units):
            assert node.counts[plane] == int((units != ABSENT).sum()), "a node's count is wrong"
            below = sum(child.counts[plane] > 0 for child in node.children.values())
            assert node.below[plane] == below, "a node's count of children is wrong"


def pages_are_supported(cache: PrefixCache) -> None:
    """H08: no page without a unit it can't do without, where a family is ordered."""
    if not any(plane.family.is_ordered for plane in cache.layout.device):
        return
    for node in cache.index.tree.nodes():
        for place in range(node.num_pages):
            assert cache.index.is_supported(node, place), "a page that nothing can resume through"


def held_units_have_held_units_above(cache: PrefixCache) -> None:
    for plane in cache.layout.planes:
        if not plane.is_ordered:
            continue
        holders = cache.index.pools[plane.index].holders
        for node in cache.index.tree.nodes():
            units = node.units[plane.index]
            is_held = holders[units[units != ABSENT]] > 0
            assert not (is_held[1:] & ~is_held[:-1]).any(), "a held unit lies below a loose one"
            if len(is_held) and is_held[0]:
                above = cache.index.units_above(node, node.first, plane.index)
                assert (holders[above] > 0).all(), "a held node lies below a loose unit"


def device_units_have_no_holes(cache: PrefixCache) -> None:
    """An ordered family's device units have device units above them, all the way."""
    for plane in cache.layout.device:
        if not plane.family.is_ordered:
            continue
        for node in cache.index.tree.nodes():
            present = node.units[plane.index] != ABSENT
            assert not (present[1:] & ~present[:-1]).any(), "a hole in an ordered family"
            parent = node.parent
            if present[0] and parent is not None and parent.num_pages:
                assert parent.units[plane.index][-1] != ABSENT, "a unit below an absent one"


def loose_units_are_queued(cache: PrefixCache) -> None:
    """What counts as available will be found by the evictor."""
    for plane, evictor in zip(cache.layout.planes, cache.evictors, strict=True):
        for node in cache.index.tree.nodes():
            is_tail = not (plane.is_ordered and node.below[plane.index])
            if is_tail and node.counts[plane.index] and len(evictor.loose(node, node.num_pages)):
                assert node.queued >> plane.index & 1, f"loose units not up for eviction: {plane}"


def namespaces_know_where_they_begin(cache: PrefixCache) -> None:
    tree = cache.index.tree
    begins = {n.serial for n in tree.nodes() if n.parent and n.parent.namespace != n.namespace}
    known = {serial for starts in tree.by_namespace.values() for serial in starts}
    assert begins == known, "the index of namespaces is wrong"
