"""What the host has of requests that wait, and keeps for them (T04).

In: whose prompt, and its tokens. Out: a `Keep`, whose units nobody evicts until it is let go of.
Pages come from storage for requests that are not next; without this, what comes for those behind
would push out what came for those before. Who keeps something, and for how long, is decided in the
scheduler. Only the host's units are kept: the device's are for those that run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from manyroots.cache.holding import Holder
from manyroots.cache.index import Index
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import path_units
from manyroots.cache.planes import ABSENT, Units
from manyroots.cache.publishing import Publisher, nearest_attached
from manyroots.cache.tree import Node
from manyroots.step import Int32s

MOST_KEPT = 0.75
"""The share of the host that may be kept for several requests, fetches under way included: the rest
is left for write-back, or nothing new would reach storage while many wait. One may have it all."""


@dataclass(eq=False, slots=True)
class Keep:
    """What one request has kept for it. Only the cache changes it."""

    key: PrefixKey
    cursor: Node
    """The deepest node on its path, when it was kept."""
    units: dict[int, Units] = field(default_factory=dict)
    """By plane of the host; no more once they were evicted by name."""


class Keeper:
    """Keeps that were not let go of."""

    def __init__(self, index: Index, holder: Holder, publisher: Publisher) -> None:
        self._index = index
        self._holder = holder
        self._publisher = publisher
        self.open: dict[Keep, None] = {}
        self._counts: dict[int, Counter[int]] = {p.index: Counter() for p in index.layout.host}
        """By plane: how many keep each unit."""

    def keep(self, key: PrefixKey, tokens: Int32s) -> Keep:
        """Keep what a request would resume from now and the host has, on the device as well or
        not: from there it may be gone when its turn comes."""
        nodes, depth, _, limit = self._holder.walk(key, tokens)
        keep = Keep(key, nodes[-1] if nodes else self._index.tree.root)
        self.open[keep] = None
        layout, page_size = self._index.layout, self._index.layout.page_size
        num_pages = self._holder.match(nodes, depth, limit).num_worthwhile_pages
        for plane in layout.device if num_pages else ():
            host, first = layout.host_of(plane).index, num_pages - 1
            if not plane.family.is_state:
                first = plane.family.first_needed(num_pages * page_size)
            units = path_units(nodes, depth, layout.host_of(plane))[first:num_pages]
            keep.units[host] = units = units[units != ABSENT]
            self._index.pools[host].hold(units)
            self._counts[host].update(units.tolist())
        return keep

    def let_go(self, keep: Keep) -> None:
        """Its request begins, or is over. What was kept stays until its room is needed."""
        del self.open[keep]
        self._drop(keep)

    def drop_lost(self) -> None:
        """Something was evicted by name: what can't be found any more is kept for nobody."""
        for keep in self.open:
            if not keep.cursor.is_attached:
                self._drop(keep)

    def num_kept(self, plane: int) -> int:
        """Units of a plane that anybody keeps, each counted once."""
        return len(self._counts[plane])

    def _drop(self, keep: Keep) -> None:
        for plane, units in keep.units.items():
            self._index.pools[plane].drop(units)
            counts = self._counts[plane]
            for unit in units.tolist():
                counts[unit] -= 1
                if not counts[unit]:
                    del counts[unit]
        keep.units.clear()
        self._publisher.offer_path(nearest_attached(keep.cursor))
