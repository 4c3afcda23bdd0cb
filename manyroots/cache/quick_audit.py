"""Every invariant of `audit.py` in one pass: the same answer, several times faster.

In: a cache. Out: whether every invariant holds, or AssertionError with the violation. For long
runs that audit after each of millions of steps.

Checked after every step, of everything there is and not only of what changed: each function of
`audit.py`, on every pool, node, queue, lease, copy, ticket and keep. Where the answer is no, the
whole audit runs and says why. It also runs at the first step and after every `whole_every`, and the
two must agree; so they must on caches that tests corrupt, field by field
(`tests/unit/cache/test_quick_audit.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.eviction import Evictor
from manyroots.cache.keys import Owner
from manyroots.cache.planes import ABSENT
from manyroots.cache.tree import TOKEN_BYTES, Node, PathHold
from manyroots.ids import HASH_BYTES, Tier

WHOLE_EVERY = 16
"""Of a long run: the whole audit after every so many steps."""


PlaneCheck = tuple[int, int, Callable[[int], int], list[int], bool, int, Evictor]
"""See `_planes_to_check`."""


class QuickAudit:
    """Audits one cache again and again."""

    def __init__(self, cache: PrefixCache, whole_every: int = WHOLE_EVERY) -> None:
        """`whole_every`: 1 runs the whole audit each time."""
        self._cache = cache
        self._whole_every = whole_every
        self._num_audits = 0
        layout = cache.layout
        self._page_bytes = layout.page_size * TOKEN_BYTES
        self._num_planes = len(layout.planes)
        self._is_ordered = tuple(plane.is_ordered for plane in layout.planes)
        self._has_reach = tuple(plane.family.reach is not None for plane in layout.planes)
        self._attention = tuple(p.index for p in layout.device if not p.family.is_state)
        self._host = tuple(plane.index for plane in layout.host)
        self._on_host = {plane.index for plane in layout.planes if plane.tier is Tier.HOST}
        is_led = any(plane.family.is_ordered for plane in layout.device)
        self._spine = tuple(plane.index for plane in layout.spine) if is_led else ()
        self._spine_bits = sum(1 << plane for plane in self._spine)
        self._bare = (ABSENT,) * len(self._spine)

    def audit(self) -> None:
        """Raises AssertionError saying which invariant does not hold."""
        is_whole = self._num_audits % self._whole_every == 0
        self._num_audits += 1
        is_right = self.holds()
        if is_whole or not is_right:
            audit(self._cache)
        assert is_right, "the quick audit sees a violation that the whole one does not"

    def holds(self) -> bool:
        """Whether every invariant does."""
        try:
            return self._holds()
        except (AssertionError, LookupError, ValueError):
            return False  # a number of a unit, or a count of units, that can't be

    def _holds(self) -> bool:
        cache, held = self._cache, self._held_units()
        if held is None:
            return False
        found: list[list[int]] = [[] for _ in held]
        by_unit = [pool.holders.tolist() for pool in cache.index.pools]
        for holders in by_unit:
            holders.append(0)  # absent units are -1
        if not self._nodes_hold(by_unit, found):
            return False
        for plane, pool in enumerate(cache.index.pools):
            holders, indexed = by_unit[plane], pool.indexed.tolist()
            holders.pop()
            free, num_units = pool.free_units().tolist(), len(holders)
            counted = [0] * num_units
            for unit in held[plane]:
                counted[unit] += 1
            in_tree = found[plane]
            in_tree.sort()
            num_held = num_units - holders.count(0)
            num_cached = list(compress(holders, indexed)).count(0)
            if not (
                (not held[plane] or min(held[plane]) >= 0)
                and counted == holders
                and pool.num_cached == num_cached
                and pool.num_held == num_held
                and pool.num_free + num_cached + num_held == pool.num_units
                and len(set(free)) == pool.num_free == len(free)
                and not any(map(holders.__getitem__, free))
                and not any(map(indexed.__getitem__, free))
                and in_tree[in_tree.count(ABSENT) :] == list(compress(range(num_units), indexed))
            ):
                return False
            if pool.num_lent:
                lent = set(pool.lent_units().tolist())
                if len(lent) != pool.num_lent or not lent.isdisjoint(free):
                    return False
                if any(holders[unit] or indexed[unit] for unit in lent):
                    return False
        if cache.forks is not None:
            cache.forks.audit()
        return True

    def _held_units(self) -> list[list[int]] | None:
        """By plane, the units of each holder; None where a holder is wrong in itself."""
        cache = self._cache
        held: list[list[int]] = [[] for _ in range(self._num_planes)]
        paths: dict[PathHold, int] = {}
        for lease in cache.open_leases.values():
            path = lease.path_hold
            for plane in self._attention:
                table = lease.tables[plane].tolist()
                first = lease.first_live[plane]
                own = table
                if first or ABSENT in table:
                    dead = table[:first]
                    if dead.count(ABSENT) != len(dead):
                        return None
                    own = [unit for unit in table if unit != ABSENT]
                if len(set(own)) != len(own):
                    return None
                if path is not None:
                    shared = path.units.tolist()
                    if table[: len(shared)] != shared:
                        return None
                    own = table[len(shared) :]
                held[plane] += own
            if path is not None:
                paths[path] = paths.get(path, 0) + 1
            for family, unit in lease.states.items():
                held[family].append(unit)
            for family, unit in lease.resumed.items():
                held[family].append(unit)
            for checkpoint in lease.checkpoints:
                held[checkpoint.family].append(checkpoint.unit)
            for plane, duplicates in lease.duplicates:
                held[plane] += duplicates.tolist()
            for family, _, unit in lease.onboarding:
                held[self._host[family]].append(unit)
        for path, num_leases in paths.items():
            if path.num_leases != num_leases:
                return None
            held[0] += path.units.tolist()
        self._paths = paths
        for move in cache.transfers.moves():
            held[move.source.index] += move.source_units.tolist()
            held[move.source.index] += move.path.tolist()
            if move.target is not None:
                held[move.target.index] += move.target_units.tolist()
        for ticket in cache.prefetcher.tickets():
            for target, units in ticket.units.values():
                held[target.index] += units.tolist()
        for keep in cache.keeper.open:
            for plane, units in keep.units.items():
                if plane not in self._on_host:
                    return None
                held[plane] += units.tolist()
        for units_of, pool in zip(held, cache.index.pools, strict=True):
            if units_of and max(units_of) >= len(pool.holders):
                return None
        return held

    def _queued_bits(self) -> dict[int, int] | None:
        """By node in the tree, the queues that have it; None where one has it twice, or miscounts
        its units."""
        bits: dict[int, int] = {}
        for evictor in self._cache.evictors:
            for bit, queues in evictor.queues:
                for queue in queues:
                    total = 0
                    for _, _, node, num_units in queue.entries:
                        total += num_units
                        if node.is_attached:
                            known = bits.get(id(node), 0)
                            if known & bit:
                                return None
                            bits[id(node)] = known | bit
                    if total != queue.num_units:
                        return None
        return bits

    def _nodes_hold(self, by_unit: list[list[int]], found: list[list[int]]) -> bool:
        """Every invariant of nodes. `by_unit`: of each plane, holders by unit, and 0 for none.
        Adds the units of nodes to `found`, absent ones included."""
        tree, page_bytes = self._cache.index.tree, self._page_bytes
        bits = self._queued_bits()
        if bits is None:
            return False
        planes = self._planes_to_check(by_unit, found)
        first_pages: dict[tuple[str | None, bytes], int] = {}
        begins = set()
        # Nodes; ordered planes whose unit of their last page is absent, and those where no request
        # holds it, as bits.
        stack: list[tuple[Node, int, int]] = [(tree.root, 0, 0)]
        while stack:
            parent, gap_above, loose_above = stack.pop()
            below = [0] * self._num_planes
            before = parent.owner
            for key, node in parent.children.items():
                owner, keys, num_pages = node.owner, node.keys, node.num_pages
                queued = node.queued
                if (
                    owner is None
                    or node.parent is not parent
                    or not node.is_attached
                    or num_pages <= 0
                    or node.first != parent.end
                    or node.end != node.first + num_pages
                    or len(keys) != num_pages * page_bytes
                    or (node.hashes and len(node.hashes) != num_pages * HASH_BYTES)
                    or key != (owner, keys[:page_bytes])
                    or bits.pop(id(node), 0) != queued
                    or (node.path_hold is not None and not self._path_holds(node, node.path_hold))
                ):
                    return False
                if owner is not before or owner.begin:
                    if not self._owner_holds(owner, before, num_pages):
                        return False
                    if before is None:
                        page = owner.namespace.salt, key[1]
                        first_pages[page] = first_pages.get(page, 0) + 1
                    if before is None or before.namespace != owner.namespace:
                        begins.add(node.serial)
                gap = loose = whole = 0
                for array, count, of_plane in zip(node.units, node.counts, planes, strict=True):
                    plane, bit, holders_of, in_tree, is_ordered, spare_bit, evictor = of_plane
                    units = array.tolist()
                    num_absent = num_pages - count
                    if len(units) != num_pages or units.count(ABSENT) != num_absent:
                        return False
                    if not count:
                        gap, loose = gap | bit, loose | bit
                        continue
                    below[plane] += 1
                    in_tree += units
                    if not num_absent:
                        whole |= bit
                    holders = list(map(holders_of, units))
                    num_loose = holders.count(0)
                    if is_ordered:
                        # Units, and those that are held, begin at the root and have no holes.
                        if gap_above & bit:
                            return False
                        if num_absent:
                            gap |= bit
                            if ABSENT in units[:count]:
                                return False
                        if num_loose:
                            loose |= bit
                            if 0 in holders[: num_pages - num_loose]:
                                return False
                        if loose_above & bit and num_loose < num_pages:
                            return False
                    if num_loose > num_absent:
                        if not queued & bit and not (is_ordered and node.below[plane]):
                            return False
                        is_listed = not spare_bit or queued & spare_bit
                        if not is_listed and evictor.has_spare(node, units, holders):
                            return False
                if self._bare and not whole & self._spine_bits and self._is_bare(node):
                    return False
                if node.children:
                    stack.append((node, gap, loose))
                elif any(node.below):
                    return False
            if parent.below != below:
                return False
        known = {serial for starts in tree.by_namespace.values() for serial in starts}
        is_counted = dict.__eq__(first_pages, tree.first_pages)
        return not bits and begins == known and is_counted

    def _planes_to_check(
        self, by_unit: list[list[int]], found: list[list[int]]
    ) -> list[PlaneCheck]:
        """Of each plane: its number, bit, holders by unit, units found, whether it is ordered, the
        bit of its queue of spare units where that is up to date, and what evicts from it."""
        checked: list[PlaneCheck] = []
        for plane, evictor in enumerate(self._cache.evictors):
            spare_bit = 0
            if self._has_reach[plane] and evictor.is_up_to_date:
                spare_bit = 1 << self._num_planes + plane
            holders_of, is_ordered = by_unit[plane].__getitem__, self._is_ordered[plane]
            checked.append(
                (plane, 1 << plane, holders_of, found[plane], is_ordered, spare_bit, evictor)
            )
        return checked

    def _owner_holds(self, owner: Owner, before: Owner | None, num_pages: int) -> bool:
        """Of a node's first page, and of the page before it."""
        space = owner.namespace
        if owner.begin:
            if space.adapter is None or num_pages > 1:
                return False
            if not 0 < owner.begin < self._cache.page_size:
                return False
        if before is None or (before.namespace == space and not owner.begin):
            return True
        return before.namespace.salt == space.salt and before.namespace.adapter is None

    def _is_bare(self, node: Node) -> bool:
        """Whether a page has no unit on any plane that pages need."""
        columns = [node.units[plane].tolist() for plane in self._spine]
        return self._bare in zip(*columns, strict=True)

    def _path_holds(self, node: Node, path: PathHold) -> bool:
        if path not in self._paths or path.node is not node:
            return False
        if not node.first < path.depth <= node.end:
            return False
        units = self._cache.index.units_above(node, path.depth, 0)
        return set(units.tolist()) == set(path.units.tolist())
