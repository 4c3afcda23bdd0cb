"""Whose adapter's turn it is: the cap on distinct adapters, and that none starves under it.

Knows which adapters are on the device and who waits; not pages, rows or budgets.
"""

from __future__ import annotations

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request

AGING_STEPS = 64
"""A request that the cap on adapters has held back for so many steps keeps new requests of other
adapters from beginning, so that its turn comes when those that run now are done (L06)."""


def has_aged(request: Request, step_id: StepId) -> bool:
    return step_id - request.waiting_since > AGING_STEPS


class AdapterTurns:
    """Decides which lanes may begin, and which adapters to bring to the device for them."""

    def __init__(self, adapters: Residency, max_loras: int) -> None:
        self._adapters = adapters
        self._max_loras = max_loras

    def may_begin(self, request: Request) -> bool:
        """Whether a request could be seated now."""
        return self.is_on_device(request.group[0])

    def is_on_device(self, adapter: AdapterDigest | None) -> bool:
        """Whether an adapter is there and within the cap; the base model always is."""
        return adapter is None or self._adapters.readiness(adapter) is Readiness.READY

    def open_lanes(
        self, waiting: WaitingQueue, step_id: StepId
    ) -> dict[AdapterDigest | None, None]:
        """Adapters that can be used in this step, of those that requests wait for."""
        lanes, on_device = waiting.lanes, self._adapters.slots.by_owner
        is_open: dict[AdapterDigest | None, None] = {None: None} if None in lanes else {}
        if len(lanes) > len(is_open) and self._urgent(waiting, step_id) is None:
            # Adapters that are wanted may be many more than those that are there, or many fewer.
            few = lanes if len(lanes) < len(on_device) else on_device
            is_open |= dict.fromkeys(d for d in few if d in lanes and self.is_on_device(d))
        return is_open

    def prepare(
        self, waiting: WaitingQueue, without_room: set[AdapterDigest | None], step_id: StepId
    ) -> None:
        """Bring what waiting requests need to the device, most urgent first; what has no room for
        its pages comes last, since its weights would lie idle."""
        most = self._max_loras or len(waiting.lanes)
        first = waiting.first_lanes(most + len(without_room) + 1)
        wanted = [lane.adapter for lane in first if lane.adapter is not None]
        if not wanted:
            return
        urgent = self._urgent(waiting, step_id)
        wanted.sort(key=lambda adapter: (adapter != urgent, adapter in without_room))
        self._adapters.prepare(wanted[:most])

    def _urgent(self, waiting: WaitingQueue, step_id: StepId) -> AdapterDigest | None:
        """The adapter whose request has been held back for too long, if there is one."""
        if not self._max_loras:
            return None
        for lane in waiting.first_lanes(1):
            if has_aged(lane.head, step_id) and not self.is_on_device(lane.adapter):
                return lane.adapter
        return None
