"""Working states of families that have one, and the checkpoints saved of them (H06).

A state is copied within the device: restored before the first step of a lease that resumes from a
checkpoint, saved at the end of a step that reaches a boundary where one is wanted.
"""

from __future__ import annotations

import numpy as np

from manyroots.cache.checkpoints import is_due
from manyroots.cache.eviction import Allocator
from manyroots.cache.index import Index
from manyroots.cache.lease import Checkpoint, Lease
from manyroots.cache.publishing import Publisher, nearest_attached
from manyroots.cache.transfers import UnitTransfers
from manyroots.ids import StepId, Tier
from manyroots.step import Copy


class States:
    """Copies states within the device."""

    def __init__(
        self,
        index: Index,
        allocator: Allocator,
        transfers: UnitTransfers,
        publisher: Publisher,
        *,
        reuse: bool,
    ) -> None:
        self._index = index
        self._layout = index.layout
        self._page_size = index.layout.page_size
        self._allocator = allocator
        self._transfers = transfers
        self._publisher = publisher
        self._reuse = reuse
        self._copies: list[Copy] = []
        self.num_skipped = 0
        """Checkpoints that there was no room for."""

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies for the step being planned, in the order they must run."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def start(self, lease: Lease, family: int, unit: int) -> None:
        """The lease has a working state now, restored from a checkpoint if one was found."""
        lease.states[family] = unit
        saved = lease.resumed.pop(family, None)
        if saved is not None:
            lease.num_saved_pages = lease.num_cached_tokens // self._page_size
            self._publisher.resumed(lease, lease.num_saved_pages)
            self._copy(family, saved, unit, is_after_model=False)
            # Steps run in order, and restore before they load: whoever gets the checkpoint's unit
            # writes it later.
            self._index.pools[family].drop(np.array([saved], np.intp))
            self._publisher.offer_path(nearest_attached(lease.cursor))

    def save(self, lease: Lease, family: int, num_tokens: int, step_id: StepId) -> None:
        """Where a state is wanted, save it at the end of this step, if there is room (H06)."""
        plane = self._layout.device[family]
        if not self._reuse or not is_due(plane.family, lease, num_tokens, self._page_size):
            return
        newest = [c for c in lease.checkpoints if c.family == family]
        is_output = num_tokens > lease.num_prompt_tokens
        if is_output and newest and newest[-1].boundary * self._page_size > lease.num_prompt_tokens:
            checkpoint = newest[-1]  # the output keeps its newest state only: same unit again
            checkpoint.boundary, checkpoint.step_id = num_tokens // self._page_size, step_id
        elif self._index.pools[family].num_available == 0:
            self.num_skipped += 1
            return
        else:
            unit = int(self._allocator.allocate(family, 1)[0])
            checkpoint = Checkpoint(family, num_tokens // self._page_size, unit, step_id)
            lease.checkpoints += (checkpoint,)
            if not is_output:
                lease.num_saved_pages = checkpoint.boundary
        self._copy(family, lease.states[family], checkpoint.unit, is_after_model=True)

    def _copy(self, family: int, source: int, target: int, *, is_after_model: bool) -> None:
        self._copies.append(
            Copy(self._transfers.next_id(), family, Tier.DEVICE, Tier.DEVICE,
                 np.array([source], np.int32), np.array([target], np.int32),
                 is_after_model=is_after_model)
        )  # fmt: skip
