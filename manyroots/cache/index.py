"""What can be found: the tree, and the matching flags of the pools.

The only module that adds units to the tree or removes them, so that pools, events and hashes always
agree with it. Knows nothing of leases, or of why units are added or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from manyroots.cache.events import CacheEvent, PagesRemoved, PagesStored
from manyroots.cache.keys import PageHasher
from manyroots.cache.planes import ABSENT, CacheLayout, Units
from manyroots.cache.pool import UnitPool
from manyroots.cache.tree import TOKEN_BYTES, ChildKey, Indices, Node, PageRange, PrefixTree, absent
from manyroots.ids import HASH_BYTES, StepId


class Index:
    """Tree and pools, kept consistent."""

    def __init__(
        self, layout: CacheLayout, hasher: PageHasher | None, *, records_events: bool
    ) -> None:
        self.layout = layout
        self.pools = [UnitPool(plane.num_units) for plane in layout.planes]
        self.tree = PrefixTree(layout.page_size, len(layout.planes))
        assert hasher is not None or not records_events, "events name pages by their hashes"
        self._hasher = hasher
        self._page_bytes = layout.page_size * TOKEN_BYTES
        self._spine = [plane.index for plane in layout.spine]
        only = layout.spine[0]
        is_alone = len(layout.spine) == 1 and only.family.is_ordered
        self._sole_support = only.index if is_alone else None
        """The only plane whose units a page needs; a page without one, and everything after it, is
        useless."""
        # A page is announced once per tier, by the first family that it needs.
        tiers = {layout.planes[i].tier: i for i in reversed(self._spine)}
        self._event_planes = {i: tier for tier, i in tiers.items()} if records_events else {}
        self.events: list[CacheEvent] = []
        self.on_loosened: Callable[[Node], None] = lambda node: None
        """Called with nodes that may have evictable units now; set by the cache."""

    def add(self, node: Node, plane: int, places: PageRange, units: Units) -> None:
        """Held units can now be found at these pages, which had none."""
        self.tree.set_units(node, plane, places, units)
        self.pools[plane].index(units)
        if plane in self._event_planes:
            self.events.append(self._stored(node, plane, places))

    def add_leaf(
        self, parent: Node, page: ChildKey, keys: bytes, units: Units, step: StepId
    ) -> Node:
        """Like `add`, for new pages after `parent`, with the units of the only plane; the first of
        them is `page`."""
        leaf = self.tree.add(parent, page, keys, [units.copy()], step)
        leaf.counts[0] = leaf.num_pages
        parent.below[0] += 1
        self.pools[0].index(units)
        if self._hasher is not None:
            self._tell_of(leaf, 0)
        return leaf

    def _tell_of(self, leaf: Node, first: int) -> None:
        """Announce a leaf's pages on the only plane, from its `first` on."""
        self.fill_hashes(leaf)
        if self._event_planes:
            self.events.append(self._stored(leaf, 0, slice(first, leaf.num_pages)))

    def lengthen(self, leaf: Node, keys: bytes, units: Units) -> None:
        """Like `add`, for new pages after the last of a leaf that has all its units on the only
        plane."""
        first = leaf.num_pages
        self.tree.lengthen(leaf, keys, [units])
        leaf.counts[0] += len(units)
        self.pools[0].index(units)
        if self._hasher is not None:
            self._tell_of(leaf, first)

    def lengthen_all(self, leaf: Node, keys: bytes, units: dict[int, Units]) -> None:
        """Like `lengthen`, with the units of several planes; on other planes the new pages have
        none."""
        first = leaf.num_pages
        count = len(keys) // self._page_bytes
        planes = range(len(self.pools))
        more = [units[plane] if plane in units else absent(count) for plane in planes]
        self.tree.lengthen(leaf, keys, more)
        self.fill_hashes(leaf)
        for plane, each in units.items():
            was = leaf.counts[plane]
            leaf.counts[plane] = was + len(each)
            if was == 0 and leaf.parent is not None:
                leaf.parent.below[plane] += 1
            self.pools[plane].index(each)
            if plane in self._event_planes:
                self.events.append(self._stored(leaf, plane, slice(first, leaf.num_pages)))

    def remove(self, node: Node, plane: int, places: Indices) -> None:
        """These pages' units can no longer be found; units without a holder become free.

        Pages that lost their last unit are removed with everything that is reached only through
        them (H08). `places` are in ascending order.
        """
        if len(places) == 0:
            return
        if plane == self._sole_support:
            self.cut(node, node.first + int(places[0]))
            return
        if plane in self._event_planes:
            self.events.append(self._removed(node, plane, places.tolist()))
        self.pools[plane].unindex(self.tree.clear_units(node, plane, places))
        useless = self._first_useless(node, plane, places)
        if useless is not None:
            self.cut(node, useless)
        self._loosened(node)

    def _first_useless(self, node: Node, plane: int, places: Indices) -> int | None:
        """The depth from which a node is useless, now that these units are gone."""
        if plane not in self._spine:
            return None
        if self.layout.planes[plane].family.is_ordered:
            is_kept = np.zeros(len(places), np.bool_)
            for other in self._spine:
                is_kept |= node.units[other][places] != ABSENT
            lost = places[~is_kept]
            return node.first + int(lost[0]) if len(lost) else None
        if node.children:
            return None
        keep = self.num_supported(node)
        return node.first + keep if keep < node.num_pages else None

    def cut(self, node: Node, depth: int) -> None:
        """Nothing from `depth` on that is reached through `node` can be found any more."""
        for gone in self.tree.cut(node, depth):
            for plane, units in enumerate(gone.units):
                if gone.counts[plane] == 0:
                    continue
                places: Sequence[int] = range(gone.num_pages)
                if gone.counts[plane] < gone.num_pages:
                    present = units != ABSENT
                    units, places = units[present], present.nonzero()[0].tolist()
                if plane in self._event_planes:
                    self.events.append(self._removed(gone, plane, places))
                self.pools[plane].unindex(units)
        self._loosened(node)

    def _loosened(self, node: Node) -> None:
        """After a loss, a node or its parent may have no successors and become evictable."""
        if node.is_attached:
            self.on_loosened(node)
        if node.parent is not None:
            self.on_loosened(node.parent)

    def units_above(self, node: Node, depth: int, plane: int) -> Units:
        """The units of one plane on the path down to `depth`, which `node` covers or ends at."""
        runs = []
        current: Node | None = node
        while current is not None:
            units = current.units[plane][: max(0, depth - current.first)]
            runs.append(units[units != ABSENT])
            current = current.parent
        return np.concatenate(runs)

    def has_unit_above(self, node: Node, place: int, plane: int) -> bool:
        """Whether the page before this one has a unit on the plane, or there is none before it."""
        if place > 0:
            return bool(node.units[plane][place - 1] != ABSENT)
        parent = node.parent
        return parent is None or not parent.num_pages or bool(parent.units[plane][-1] != ABSENT)

    def is_supported(self, node: Node, place: int) -> bool:
        """Whether a page has a unit on any plane that it needs."""
        return any(node.units[plane][place] != ABSENT for plane in self._spine)

    def num_supported(self, node: Node) -> int:
        """Pages up to the last one with a unit that it needs."""
        present = np.zeros(node.num_pages, np.bool_)
        for plane in self._spine:
            present |= node.units[plane] != ABSENT
        places = present.nonzero()[0]
        return int(places[-1]) + 1 if len(places) else 0

    def fill_hashes(self, node: Node) -> None:
        """Hash the pages of a node that are not hashed yet; its parent's are."""
        if self._hasher is None or node.owner is None:
            return
        done = len(node.hashes) // HASH_BYTES
        if done < node.num_pages:
            new = self._hasher.chain(
                self._hash_before(node, done), node.owner, node.keys[done * self._page_bytes :]
            )
            node.hashes += b"".join(new)

    def hash_of(self, node: Node, place: int) -> bytes:
        return node.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]

    def _hash_before(self, node: Node, place: int) -> bytes:
        if place > 0:
            return self.hash_of(node, place - 1)
        assert self._hasher is not None
        assert node.parent is not None
        parent = node.parent
        return parent.hashes[-HASH_BYTES:] if parent.num_pages else self._hasher.root

    def _stored(self, node: Node, plane: int, places: PageRange) -> PagesStored:
        assert node.owner is not None
        consecutive = np.arange(node.num_pages)[places]
        first, last = int(consecutive[0]), int(consecutive[-1])
        assert last - first + 1 == len(consecutive), "pages of one event must be consecutive"
        is_first = node.first + first == 0
        return PagesStored(
            tier=self._event_planes[plane],
            namespace=node.owner.namespace,
            begin=node.owner.begin,
            parent=None if is_first else self._hash_before(node, first),
            hashes=_hashes(node, range(first, last + 1)),
            tokens=node.keys[first * self._page_bytes : (last + 1) * self._page_bytes],
        )

    def _removed(self, node: Node, plane: int, places: Sequence[int]) -> PagesRemoved:
        assert node.owner is not None
        return PagesRemoved(self._event_planes[plane], *node.owner, _hashes(node, places))


def _hashes(node: Node, places: Sequence[int]) -> tuple[bytes, ...]:
    hashes = node.hashes
    return tuple([hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in places])
