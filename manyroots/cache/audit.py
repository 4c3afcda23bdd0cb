"""One function per invariant of the cache; each raises AssertionError saying what is wrong.

For tests and the simulator, which call `audit` after every step. Reads everything, O(pages).
"""

from __future__ import annotations

from collections import Counter

from manyroots.cache.cache import PrefixCache


def audit(cache: PrefixCache) -> None:
    """Every invariant."""
    pages_balance(cache)
    holders_are_the_open_leases(cache)
    free_pages_are_nobodys(cache)
    index_is_the_tree(cache)
    nodes_are_linked(cache)
    held_pages_have_held_pages_above(cache)
    loose_leaves_are_queued(cache)


def pages_balance(cache: PrefixCache) -> None:
    """Ledger H10: free + cached + held = total."""
    pool = cache.pool
    held = int((pool.holders > 0).sum())
    cached = int(((pool.holders == 0) & pool.indexed).sum())
    assert pool.num_cached == cached, f"num_cached is {pool.num_cached}, counted {cached}"
    assert pool.num_held == held, f"num_held is {pool.num_held}, counted {held}"
    assert pool.num_free + cached + held == pool.num_pages


def holders_are_the_open_leases(cache: PrefixCache) -> None:
    counted: Counter[int] = Counter()
    for lease in cache.open_leases:
        assert len(set(lease.pages)) == len(lease.pages), "a lease holds a page twice"
        counted.update(lease.pages)
        for copies in lease.copies:
            counted.update(copies.tolist())
    actual = {int(p): int(cache.pool.holders[p]) for p in cache.pool.holders.nonzero()[0]}
    assert dict(counted) == actual, f"holders {actual}, leases say {dict(counted)}"


def free_pages_are_nobodys(cache: PrefixCache) -> None:
    free = cache.pool.free_pages()
    assert len(free) == cache.pool.num_free, "a page is free twice"
    for page in free:
        assert cache.pool.holders[page] == 0, f"free page {page} is held"
        assert not cache.pool.indexed[page], f"free page {page} is indexed"


def index_is_the_tree(cache: PrefixCache) -> None:
    pages = [int(page) for node in cache.tree.nodes() for page in node.pages]
    assert len(set(pages)) == len(pages), "the tree leads to a page twice"
    indexed = set(cache.pool.indexed.nonzero()[0].tolist())
    assert set(pages) == indexed, "the tree and the index flags disagree"


def nodes_are_linked(cache: PrefixCache) -> None:
    page_bytes = cache.page_size * 4
    for node in cache.tree.nodes():
        assert node.is_attached
        assert node.parent is not None
        assert node.namespace is not None
        assert len(node.pages) > 0, "an empty node"
        assert len(node.keys) == len(node.pages) * page_bytes
        assert node.first == node.parent.end, "a node does not begin where its parent ends"
        assert node.parent.children[(node.namespace, node.keys[:page_bytes])] is node


def held_pages_have_held_pages_above(cache: PrefixCache) -> None:
    holders = cache.pool.holders
    for node in cache.tree.nodes():
        held = holders[node.pages] > 0
        assert not (held[1:] & ~held[:-1]).any(), "a held page lies below a loose one"
        if held[0] and node.parent is not None and len(node.parent.pages):
            assert holders[node.parent.pages[-1]] > 0, "a held node lies below a loose one"


def loose_leaves_are_queued(cache: PrefixCache) -> None:
    """What can be evicted will be found by the evictor."""
    for node in cache.tree.nodes():
        if node.is_leaf and cache.pool.holders[node.pages[-1]] == 0:
            assert node.is_queued, "a leaf that nobody holds is not up for eviction"
