"""Finds what a lease can reuse, holds it, and frees it in the end.

In: a prompt's owner and tokens. Out: how far it can be resumed and why not further, and units that
a lease holds on any tier. Does not allocate, and publishes nothing.
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.costs import Costs
from manyroots.cache.index import Index
from manyroots.cache.keys import PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.matching import Limit, Match, judge, path_units
from manyroots.cache.planes import ABSENT
from manyroots.cache.tree import ChildKey, Node, Walk
from manyroots.step import Int32s

FoundPath = tuple[list[Node], int, ChildKey | None, Limit]
"""The nodes of a walk, its number of pages, the tree's key of the next page, and the reason that
there is no more."""
NO_WALK: FoundPath = ([], 0, None, Limit.OFF)
"""For a request that may reuse nothing."""


class Holder:
    """Holds what is found, for any mix of families and tiers."""

    def __init__(self, index: Index, costs: Costs, *, reuse: bool) -> None:
        self._index = index
        self._layout = index.layout
        self._page_size = index.layout.page_size
        self._tree = index.tree
        self._costs = costs
        self._reuse = reuse
        self._paged = [p for p in index.layout.device if not p.family.is_state]

    def walk(
        self, key: PrefixKey, tokens: Int32s
    ) -> tuple[list[Node], int, ChildKey | None, Limit]:
        """Like the tree's `walk`, with the reason that it ends."""
        if not self._reuse:
            return NO_WALK
        tree, max_pages = self._tree, (len(tokens) - 1) // self._page_size
        nodes, depth, ahead = tree.walk(key, tokens.tobytes(), max_pages)
        if ahead is None:
            return nodes, depth, None, Limit.NOTHING
        could_be = depth == 0 or depth == key.switch_page
        if could_be and tree.has_elsewhere(key, ahead[1], Walk(nodes, depth)):
            return nodes, depth, ahead, Limit.NAMESPACE
        return nodes, depth, ahead, Limit.COLD

    def match(self, nodes: list[Node], depth: int, limit: Limit) -> Match:
        """The part of a walk that can be resumed."""
        match = judge(self._layout, Walk(nodes, depth), limit)
        gained = match.num_pages - match.num_device_pages
        if gained > 0 and not self._costs.is_worth_loading(gained, gained * self._page_size):
            return match._replace(limit=Limit.TIER)
        return match

    def hold(self, lease: Lease, nodes: list[Node], depth: int, tokens: Int32s) -> int:
        """Hold the prefix that is fastest to resume from, for all families; returns its number of
        pages."""
        match = self.match(nodes, depth, lease.limit)
        lease.limit = match.limit
        num_pages = match.num_worthwhile_pages
        if num_pages < depth:
            first = num_pages * self._page_size
            page = tokens[first : first + self._page_size].tobytes()
            lease.ahead = (lease.key.at(num_pages), page)
        if num_pages == 0:
            return 0
        lease.num_host_tokens = max(0, num_pages - match.num_device_pages) * self._page_size
        for plane in self._layout.device:
            units = path_units(nodes, depth, plane)[:num_pages]
            if plane.family.is_state:
                first = num_pages - 1
                if units[first] != ABSENT:
                    lease.resumed[plane.index] = int(units[first])
            else:
                first = plane.family.first_needed(num_pages * self._page_size)
                lease.first_live[plane.index] = first
                table = lease.tables[plane.index] = units.copy()
                table[:first] = ABSENT
            needed = units[first:]
            if num_pages == match.num_device_pages:
                self._index.pools[plane.index].hold(needed, nodes[-1].is_fork)
                continue
            on_device = needed != ABSENT
            self._index.pools[plane.index].hold(needed[on_device], nodes[-1].is_fork)
            host = self._layout.host_of(plane)
            pages = first + (~on_device).nonzero()[0]
            host_units = path_units(nodes, depth, host)[pages]
            self._index.pools[host.index].hold(host_units)
            found = zip(pages.tolist(), host_units.tolist(), strict=True)
            lease.onboarding += tuple([(plane.index, page, unit) for page, unit in found])
        return num_pages

    def num_resumable_tokens(self, lease: Lease, tokens: Int32s) -> int:
        """How many of a lease's tokens would be found if it were released and claimed again now."""
        nodes, depth, _, limit = self.walk(lease.key, tokens)
        return self.match(nodes, depth, limit).num_worthwhile_pages * self._page_size

    def give_back(self, lease: Lease) -> None:
        """Free what a lease holds of all families and tiers, except duplicates and checkpoints."""
        for plane in self._paged:
            units = lease.tables[plane.index][lease.first_live[plane.index] :]
            if lease.onboarding:
                units = units[units != ABSENT]
            self._index.pools[plane.index].drop(units)
        for family, unit in (*lease.states.items(), *lease.resumed.items()):
            self.drop(family, unit)
        for family, _, unit in lease.onboarding:
            self.drop(self._layout.host[family].index, unit)

    def drop(self, plane: int, unit: int) -> None:
        """Remove one holder of a unit."""
        self._index.pools[plane].drop(np.array([unit], np.intp))
