"""Working states of families that have one, and their saved checkpoints (H06).

States are copied within the device. A state is restored before the first step of a lease that
resumes from a checkpoint, and saved at the end of a step that reaches a boundary where one is
needed.
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
        self._stateful = [plane for plane in index.layout.device if plane.family.is_state]
        self._allocator = allocator
        self._transfers = transfers
        self._publisher = publisher
        self._reuse = reuse
        self._copies: list[Copy] = []
        self._doubled: dict[int, dict[int, Lease]] = {}
        """By family and serial: leases that hold two states of their output."""
        self.num_skipped = 0
        """Checkpoints that were skipped because there was no room."""

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies for the step being planned, in the order in which they must run."""
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
            # Steps run in order and restore before they load, so a later owner of the checkpoint's
            # unit writes it afterwards.
            self._index.pools[family].drop(np.array([saved], np.intp))
            self._publisher.offer_path(nearest_attached(lease.cursor))

    def save(self, lease: Lease, num_tokens: int, step_id: StepId) -> None:
        """Save states at the end of this step where they are needed, if there is room (H06)."""
        if not self._reuse:
            return
        # Test all before saving any: a saved state makes the next one less useful.
        due = [
            plane.index
            for plane in self._stateful
            if is_due(plane.family, lease, num_tokens, self._page_size)
        ]
        for family in due:
            self._save(lease, family, num_tokens, step_id)

    def _save(self, lease: Lease, family: int, num_tokens: int, step_id: StepId) -> None:
        self.make_room(family)
        saved = [c for c in lease.checkpoints if c.family == family and self.is_of_output(lease, c)]
        has_room = self._index.pools[family].num_available > 0
        if len(saved) > 1 or (saved and not has_room):
            unit = saved[0].unit  # the output keeps its two newest states: reuse the unit
            lease.checkpoints = tuple([c for c in lease.checkpoints if c is not saved[0]])
        elif has_room:
            unit = int(self._allocator.allocate(family, 1)[0])
            if saved:
                self._doubled.setdefault(family, {})[lease.serial] = lease
        else:
            self.num_skipped += 1
            return
        checkpoint = Checkpoint(family, num_tokens // self._page_size, unit, step_id)
        lease.checkpoints += (checkpoint,)
        if num_tokens <= lease.num_prompt_tokens:
            lease.num_saved_pages = checkpoint.boundary
        self._copy(family, lease.states[family], checkpoint.unit, is_after_model=True)

    def is_of_output(self, lease: Lease, checkpoint: Checkpoint) -> bool:
        """Whether a state covers tokens after the prompt."""
        return checkpoint.boundary * self._page_size > lease.num_prompt_tokens

    def num_passed(self, family: int) -> int:
        """Units of states that an output has passed; they are freed when units are short."""
        return len(self._doubled.get(family, ()))

    def make_room(self, family: int) -> None:
        """If no unit is available, free a state that an output has passed, if there is one: working
        states and newest ones come first."""
        doubled = self._doubled.get(family)
        if not doubled or self._index.pools[family].num_available:
            return
        lease = doubled.pop(next(iter(doubled)))
        passed = next(
            c for c in lease.checkpoints if c.family == family and self.is_of_output(lease, c)
        )
        lease.checkpoints = tuple([c for c in lease.checkpoints if c is not passed])
        self._index.pools[family].drop(np.array([passed.unit], np.intp))

    def forget(self, lease: Lease) -> None:
        """A lease ends."""
        for doubled in self._doubled.values():
            doubled.pop(lease.serial, None)

    def _copy(self, family: int, source: int, target: int, *, is_after_model: bool) -> None:
        self._copies.append(
            Copy(self._transfers.next_id(), family, Tier.DEVICE, Tier.DEVICE,
                 np.array([source], np.int32), np.array([target], np.int32),
                 is_after_model=is_after_model)
        )  # fmt: skip
