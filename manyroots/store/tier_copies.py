"""Units between tiers, beside the steps: device and host, host and storage.

Takes the copies of plans; gives their ends, in any order. Several ends may be reported at once,
each exactly once. With several ranks, `copy_ends.py` joins the ends of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyroots.ids import Tier
from manyroots.step import Copy, CopyDone, KeepStored
from manyroots.store.arena import UnitArena
from manyroots.store.copy_ends import CollectedEnds, CopyEnds
from manyroots.store.host_arena import rows_of
from manyroots.store.host_link import HostLink
from manyroots.store.layer_arrivals import LayerArrivals, LayerGroups
from manyroots.store.storage_link import StorageLink, UnitStorage


class TierCopies:
    """All copies in progress between tiers."""

    def __init__(
        self,
        device: Sequence[UnitArena],
        host: Sequence[UnitArena],
        storage: UnitStorage | None = None,
        groups: LayerGroups | None = None,
        ends: CopyEnds | None = None,
    ) -> None:
        """Arenas by family. `storage`: None without a storage tier. `groups`: None if no step may
        read copies that are still arriving. `ends`: None with one rank."""
        self.host = host
        self._ends = CollectedEnds() if ends is None else ends
        self._link = HostLink(device, host, self._ends.report, groups)
        self._storage: StorageLink | None = None
        if storage is not None:
            rows = [rows_of(arena.data) for arena in host]
            self._storage = StorageLink(rows, storage, self._ends.report)

    def start(self, copy: Copy) -> None:
        """Start a copy between tiers; returns at once."""
        self._ends.expect(1)
        if Tier.STORAGE not in (copy.source, copy.target):
            self._link.start(copy)
        elif self._storage is not None:
            self._storage.start(copy)
        else:
            raise RuntimeError(f"copy {copy.copy_id} names storage, and this engine has none")

    def start_overlapped(self, copies: Sequence[Copy]) -> LayerArrivals:
        """Start copies from the host that a step reads as they arrive; returns at once."""
        self._ends.expect(len(copies))
        return self._link.start_overlapped(copies)

    def keep_stored(self, keep: KeepStored) -> None:
        """Have storage evict pages later; nothing to do without one. Returns at once."""
        if self._storage is not None:
            self._storage.keep(keep)

    def forget_stored(self, hashes: Sequence[bytes]) -> None:
        """Remove pages of all families from storage, if there is any."""
        if self._storage is not None and hashes:
            self._storage.forget(hashes)

    def finished(self) -> tuple[CopyDone, ...]:
        """Ends that were not taken yet."""
        if self._storage is not None:
            self._storage.give_up_late_ones()
        return self._ends.take()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an end, nothing is in progress, or the timeout."""
        self._ends.wait(timeout_s)

    def close(self) -> None:
        """Finish the copies in progress; storage has a limited time for it."""
        self._link.close()
        if self._storage is not None:
            self._storage.close()
