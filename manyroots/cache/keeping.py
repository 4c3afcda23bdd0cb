"""Keeps pages on the host for waiting requests (T04).

In: a prompt's owner and tokens. Out: a `Keep`, whose units are not evicted until it is let go.
Pages arrive from storage for requests that are not next in the queue. Without keeps, pages for
later requests would evict those for earlier ones. The scheduler decides which requests keep pages,
and for how long. Only the host's units are kept: the device's are for running requests.
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
"""The share of the host that may be kept for several requests, including fetches in progress. The
rest is for write-back, or nothing new would reach storage while many wait. A single request may
have all of it."""


@dataclass(eq=False, slots=True)
class Keep:
    """What is kept for one request. Only the cache changes it."""

    key: PrefixKey
    cursor: Node
    """The deepest node on its path when it was kept."""
    units: dict[int, Units] = field(default_factory=dict)
    """By plane of the host; removed when they are evicted by name."""


class Keeper:
    """Keeps that are still held."""

    def __init__(self, index: Index, holder: Holder, publisher: Publisher) -> None:
        self._index = index
        self._holder = holder
        self._publisher = publisher
        self.open: dict[Keep, None] = {}
        self._counts: dict[int, Counter[int]] = {p.index: Counter() for p in index.layout.host}
        """By plane: how many keeps each unit has."""

    def keep(self, key: PrefixKey, tokens: Int32s) -> Keep:
        """Keep what a request would resume from now and the host has, even if the device has it,
        too: the device may lose it before the request starts."""
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
        """The request starts or ends. What was kept stays until its memory is needed."""
        del self.open[keep]
        self._drop(keep)

    def drop_lost(self) -> None:
        """Something was evicted by name: stop keeping what can no longer be found."""
        for keep in self.open:
            if not keep.cursor.is_attached:
                self._drop(keep)

    def num_kept(self, plane: int) -> int:
        """Units of a plane with at least one keep, each counted once."""
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
