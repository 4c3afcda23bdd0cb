"""The quick audit gives the whole one's answer, on caches that are right and on corrupted ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.lease import Lease
from manyroots.cache.quick_audit import QuickAudit
from manyroots.cache.tree import Node
from tests.property.cache_oracle import Machine, Walk

Corruption = Callable[[random.Random, PrefixCache], None]


def _any_node(rng: random.Random, cache: PrefixCache) -> Node:
    return rng.choice([*cache.index.tree.nodes()])


def _any_lease(rng: random.Random, cache: PrefixCache) -> Lease:
    return rng.choice([*cache.open_leases.values()])


def _add(name: str) -> Corruption:
    def corrupt(rng: random.Random, cache: PrefixCache) -> None:
        node = _any_node(rng, cache)
        setattr(node, name, getattr(node, name) + rng.choice((-1, 1)))

    return corrupt


def _add_to_list(name: str) -> Corruption:
    def corrupt(rng: random.Random, cache: PrefixCache) -> None:
        counts = getattr(_any_node(rng, cache), name)
        counts[rng.randrange(len(counts))] += rng.choice((-1, 1))

    return corrupt


def _pool_count(name: str) -> Corruption:
    def corrupt(rng: random.Random, cache: PrefixCache) -> None:
        pool = rng.choice(cache.index.pools)
        setattr(pool, name, getattr(pool, name) + rng.choice((-1, 1)))

    return corrupt


def _holders(rng: random.Random, cache: PrefixCache) -> None:
    holders = rng.choice(cache.index.pools).holders
    holders[rng.randrange(len(holders))] += rng.choice((-1, 1))


def _indexed(rng: random.Random, cache: PrefixCache) -> None:
    indexed = rng.choice(cache.index.pools).indexed
    unit = rng.randrange(len(indexed))
    indexed[unit] = not indexed[unit]


def _free(rng: random.Random, cache: PrefixCache) -> None:
    pool = rng.choice(cache.index.pools)
    stack = pool._stack
    stack[rng.randrange(len(stack))] = stack[rng.randrange(len(stack))]


def _units(rng: random.Random, cache: PrefixCache) -> None:
    node = _any_node(rng, cache)
    plane = rng.randrange(len(node.units))
    node.units[plane] = node.units[plane].copy()
    most = cache.index.pools[plane].num_units
    node.units[plane][rng.randrange(node.num_pages)] = rng.randrange(-1, most)


def _hole(rng: random.Random, cache: PrefixCache) -> None:
    """A page loses a unit that nothing holds, and all counts follow."""
    pools, nodes = cache.index.pools, [*cache.index.tree.nodes()]
    found = [
        (node, plane)
        for node in nodes
        for plane in range(len(pools))
        if node.units[plane][0] >= 0 and not pools[plane].holders[node.units[plane][0]]
        if node.counts[plane] > 1 or node.below[plane]
    ]
    node, plane = rng.choice(found)
    pools[plane].unindex(cache.index.tree.clear_units(node, plane, np.array([0])))


def _loosened(rng: random.Random, cache: PrefixCache) -> None:
    """A lease lets go of a page and keeps the later ones, and all counts follow."""
    lease = _any_lease(rng, cache)
    family = rng.randrange(len(lease.tables))
    table = lease.tables[family].copy()
    page = rng.randrange(len(table))
    if table[page] >= 0:
        cache.index.pools[family].drop(table[page : page + 1])
        table[page] = -1
        lease.tables[family] = table


def _no_units(rng: random.Random, cache: PrefixCache) -> None:
    node = _any_node(rng, cache)
    node.units = [np.full(node.num_pages, -1) for _ in node.units]


def _keys(rng: random.Random, cache: PrefixCache) -> None:
    node = _any_node(rng, cache)
    node.keys = rng.choice((node.keys[:-4], node.keys + b"\0\0\0\0", b"\7\0\0\0" + node.keys[4:]))


def _hashes(rng: random.Random, cache: PrefixCache) -> None:
    _any_node(rng, cache).hashes += b"\0" * 32


def _owner(rng: random.Random, cache: PrefixCache) -> None:
    node, other = _any_node(rng, cache), _any_node(rng, cache)
    node.owner = other.owner


def _owner_and_key(rng: random.Random, cache: PrefixCache) -> None:
    """The parent knows its child by the other owner."""
    node, other = _any_node(rng, cache), _any_node(rng, cache)
    page = node.keys[: cache.page_size * 4]
    assert node.parent is not None
    assert node.owner is not None
    assert other.owner is not None
    children = node.parent.children
    del children[node.owner, page]
    node.owner = other.owner._replace(begin=rng.choice((0, 0, 1, 2)))
    children[node.owner, page] = node


def _queued(rng: random.Random, cache: PrefixCache) -> None:
    _any_node(rng, cache).queued ^= 1 << rng.randrange(2 * len(cache.layout.planes))


def _queue_count(rng: random.Random, cache: PrefixCache) -> None:
    _, queues = rng.choice(rng.choice(cache.evictors).queues)
    rng.choice(queues).num_units += 1


def _queue_entry(rng: random.Random, cache: PrefixCache) -> None:
    _, queues = rng.choice(rng.choice(cache.evictors).queues)
    queue = rng.choice(queues)
    if queue.entries and rng.random() < 0.5:
        queue.num_units -= queue.entries.pop()[3]
    else:
        queue.push(0, _any_node(rng, cache), 0)


def _detached(rng: random.Random, cache: PrefixCache) -> None:
    _any_node(rng, cache).is_attached = False


def _another_parent(rng: random.Random, cache: PrefixCache) -> None:
    node, tree = _any_node(rng, cache), cache.index.tree
    below = {id(each) for each in tree.subtree(node)}  # a circle has no end
    node.parent = rng.choice([tree.root, *(n for n in tree.nodes() if id(n) not in below)])


def _namespaces(rng: random.Random, cache: PrefixCache) -> None:
    tree = cache.index.tree
    starts = rng.choice([*tree.by_namespace.values()])
    if rng.random() < 0.5:
        starts.popitem()
    else:
        starts[rng.randrange(100)] = _any_node(rng, cache)


def _first_pages(rng: random.Random, cache: PrefixCache) -> None:
    pages = cache.index.tree.first_pages
    pages[rng.choice([*pages])] += 1


def _table(rng: random.Random, cache: PrefixCache) -> None:
    lease = _any_lease(rng, cache)
    family = rng.randrange(len(lease.tables))
    table = lease.tables[family].copy()
    table[rng.randrange(len(table))] = rng.randrange(-1, cache.index.pools[family].num_units)
    lease.tables[family] = table


def _first_live(rng: random.Random, cache: PrefixCache) -> None:
    lease = _any_lease(rng, cache)
    lease.first_live[rng.randrange(len(lease.first_live))] += 1


def _lease_gone(rng: random.Random, cache: PrefixCache) -> None:
    del cache.open_leases[rng.choice([*cache.open_leases])]


def _states(rng: random.Random, cache: PrefixCache) -> None:
    lease = _any_lease(rng, cache)
    lease.states[0] = rng.randrange(cache.index.pools[0].num_units)


def _path_hold(rng: random.Random, cache: PrefixCache) -> None:
    held = [node.path_hold for node in cache.index.tree.nodes() if node.path_hold is not None]
    held += [lease.path_hold for lease in cache.open_leases.values() if lease.path_hold]
    path = rng.choice(held)
    kind = rng.randrange(4)
    if kind == 0:
        path.num_leases += 1
    elif kind == 1:
        path.node = _any_node(rng, cache)
    elif kind == 2:
        path.depth += rng.choice((-1, 1))
    else:
        _any_node(rng, cache).path_hold = path


def _fork_share(rng: random.Random, cache: PrefixCache) -> None:
    if cache.forks is not None:
        cache.forks.share = 2.0


def _both_counts(rng: random.Random, cache: PrefixCache) -> None:
    """A unit that no queue knows of: its holder goes, and all counts follow."""
    lease = _any_lease(rng, cache)
    cache.open_leases.pop(next(k for k, v in cache.open_leases.items() if v is lease))
    for plane in cache.layout.device:
        if not plane.family.is_state:
            table = lease.tables[plane.index]
            cache.index.pools[plane.index].drop(table[table >= 0])


CORRUPTIONS: dict[str, Corruption] = {
    **{name: _add(name) for name in ("num_pages", "first", "end")},
    **{name: _add_to_list(name) for name in ("counts", "below")},
    **{name: _pool_count(name) for name in ("num_free", "num_cached", "num_units")},
    **{f.__name__: f for f in (
        _holders, _indexed, _free, _units, _hole, _loosened,
        _no_units, _keys, _hashes, _owner, _owner_and_key, _queued, _queue_count, _queue_entry,
        _detached, _another_parent, _namespaces, _first_pages, _table, _first_live, _lease_gone,
        _states, _path_hold, _fork_share, _both_counts,
    )},
}  # fmt: skip


def whole_audit_holds(cache: PrefixCache) -> bool:
    try:
        audit(cache)
    except (AssertionError, LookupError, ValueError, TypeError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_quick_audit_sees_whatever_the_whole_one_does(name: str) -> None:
    """R01, R02: caches in the midst of random walks, over all families and tiers."""
    seen: Counter[bool] = Counter()
    for seed in range(25):
        walk = Walk.of(seed)
        machine, rng = Machine(walk.setting), random.Random(f"{name} {seed}")
        for call in walk.calls[: rng.randint(10, 60)]:
            machine.act(*call)
        cache = machine.cache
        assert QuickAudit(cache).holds()
        try:
            CORRUPTIONS[name](rng, cache)
        except (LookupError, ValueError):
            continue  # nothing there to corrupt
        is_right = whole_audit_holds(cache)
        assert QuickAudit(cache).holds() == is_right, seed
        seen[is_right] += 1
    assert seen[False], seen


def test_the_whole_audit_runs_first_and_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[PrefixCache] = []
    monkeypatch.setattr("manyroots.cache.quick_audit.audit", runs.append)
    machine = Machine(Walk.of(1).setting)
    quick = QuickAudit(machine.cache, 4)
    for _ in range(9):
        quick.audit()
    assert len(runs) == 3


def test_a_violation_is_told_by_the_whole_audit() -> None:
    machine = Machine(Walk.of(1).setting)
    quick = QuickAudit(machine.cache, 4)
    quick.audit()
    machine.cache.index.pools[0].num_cached += 1
    with pytest.raises(AssertionError, match="num_cached 1 is 0"):
        quick.audit()
