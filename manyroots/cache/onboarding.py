"""Copies to the device what a lease found on the host.

In: a lease that holds units of the host. Out: copies in progress that it waits for, or a refusal
that changed nothing. A unit that is already being copied for another lease is shared (T09).
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.eviction import Allocator
from manyroots.cache.index import Index
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Refusal
from manyroots.cache.states import States
from manyroots.cache.transfers import Spot, UnitTransfers
from manyroots.ids import CopyId


class Onboarding:
    """Starts copies from the host to the device, once for each unit."""

    def __init__(
        self, index: Index, allocator: Allocator, transfers: UnitTransfers, states: States
    ) -> None:
        self._layout = index.layout
        self._pools = index.pools
        self._allocator = allocator
        self._transfers = transfers
        self._states = states

    def may_overlap(self, lease: Lease) -> bool:
        """Whether a step could read what a lease found on the host while it arrives. Only pages,
        since a state is restored before the first layer, and only copies of this plan."""
        return not any(
            self._layout.device[family].family.is_state
            or (self._layout.host[family].index, unit) in self._transfers.loading
            for family, _, unit in lease.onboarding
        )

    def onboard(self, lease: Lease, *, overlaps: bool = False) -> Refusal | None:
        """Start loading what was found on the host; the lease is ready when it has arrived. With
        `overlaps`, loading starts with the step being planned. That step then fills the pages and
        publishes them like those that it computes."""
        coming: list[tuple[int, int, int]] = []
        missing: dict[int, list[tuple[int, int]]] = {}
        for family, page, unit in lease.onboarding:
            if (self._layout.host[family].index, unit) in self._transfers.loading:
                coming.append((family, page, unit))
            else:
                missing.setdefault(family, []).append((page, unit))
        if any(len(found) > self._num_obtainable(f) for f, found in missing.items()):
            return Refusal.NO_ROOM
        self._share(lease, coming)
        for family, found in missing.items():
            # Copies to an ordered plane are settled in the order of their pages.
            is_ordered = self._layout.device[family].is_ordered
            for run in _runs(found) if is_ordered else (found,):
                self._load(lease, family, run, overlaps)
        if overlaps:
            first = min(page for _, page, _ in lease.onboarding)
            lease.num_published_pages = min(lease.num_published_pages, first)
        lease.onboarding = ()
        return None

    def _num_obtainable(self, family: int) -> int:
        """Units that `_load` can have, counted as `Growth.can_reach` does: a request that is told
        that it has room, and is refused here, would wait for ever (L04)."""
        return self._pools[family].num_available + self._states.num_passed(family)

    def _share(self, lease: Lease, coming: list[tuple[int, int, int]]) -> None:
        """Also hold units that other leases' copies fill, and wait for these copies."""
        copies: dict[CopyId, None] = {}
        for family, page, unit in coming:
            host = self._layout.host[family].index
            copy_id, target = self._transfers.loading[host, unit]
            copies[copy_id] = None
            self._pools[family].hold(np.array([target], np.intp))
            self._pools[host].drop(np.array([unit], np.intp))  # the copy holds it
            self._put(lease, family, [page], [target])
        for copy_id in copies:
            self._transfers.join(copy_id, lease)

    def _load(
        self, lease: Lease, family: int, found: list[tuple[int, int]], overlaps: bool
    ) -> None:
        plane = self._layout.device[family]
        host = self._layout.host_of(plane)
        self._states.make_room(family)
        taken = self._allocator.allocate(family, len(found))
        sources = np.array([unit for _, unit in found], np.intp)
        spots = tuple(Spot(lease.cursor, page) for page, _ in found)
        self._pools[family].hold(taken)  # the lease's own hold, in addition to the copy's
        self._transfers.start(
            spots, host, plane, sources, taken, lease=lease, is_overlapped=overlaps
        )
        self._pools[host.index].drop(sources)  # the copy holds them now
        self._put(lease, family, [page for page, _ in found], taken.tolist())

    def _put(self, lease: Lease, family: int, pages: list[int], units: list[int]) -> None:
        if self._layout.device[family].family.is_state:
            lease.resumed[family] = units[-1]
        else:
            lease.tables[family][pages] = units


def _runs(found: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split into consecutive pages: copies in progress bring those between."""
    runs: list[list[tuple[int, int]]] = []
    for page, unit in found:
        if not runs or runs[-1][-1][0] != page - 1:
            runs.append([])
        runs[-1].append((page, unit))
    return runs
