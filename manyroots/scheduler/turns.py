"""Whose adapter's turn it is: the cap on distinct adapters, and that none starves under it.

Knows which adapters are on the device and who waits; not pages, rows or budgets.
"""

from __future__ import annotations

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.queue import GroupKey, WaitingQueue
from manyroots.scheduler.request import Request

AGING_STEPS = 64
"""A request that the cap on adapters has held back for so many steps keeps new requests of other
adapters from beginning, so that its turn comes when those that run now are done (L06)."""


def has_aged(request: Request, step_id: StepId) -> bool:
    return step_id - request.waiting_since > AGING_STEPS


class AdapterTurns:
    """Decides which groups may begin, and which adapters to bring to the device for them."""

    def __init__(self, adapters: Residency, max_loras: int) -> None:
        self._adapters = adapters
        self._max_loras = max_loras

    def may_begin(self, request: Request) -> bool:
        """Whether a request could be seated now."""
        return self.is_on_device(request.group)

    def is_on_device(self, key: GroupKey) -> bool:
        """Whether a group's adapter is there and within the cap; the base model always is."""
        return key[0] is None or self._adapters.readiness(key[0]) is Readiness.READY

    def closed_groups(self, waiting: WaitingQueue, step_id: StepId) -> set[GroupKey]:
        """Groups whose adapter can't be used in this step."""
        urgent = self._urgent(waiting, step_id)
        return {
            group.key
            for group in waiting.groups()
            if group.key[0] is not None
            and (not self.is_on_device(group.key) or urgent not in (None, group.key[0]))
        }

    def prepare(self, waiting: WaitingQueue, without_room: set[GroupKey], step_id: StepId) -> None:
        """Bring what waiting requests need to the device, most urgent first; what has no room for
        its pages comes last, since its weights would lie idle."""
        heads = [group.head for group in waiting.groups() if group.key[0] is not None]
        if not heads:
            return
        urgent = self._urgent(waiting, step_id)
        heads.sort(key=lambda r: (r.group[0] != urgent, r.group in without_room, r.serial))
        digests = list(dict.fromkeys(r.group[0] for r in heads if r.group[0] is not None))
        self._adapters.prepare(digests[: self._max_loras or None])

    def _urgent(self, waiting: WaitingQueue, step_id: StepId) -> AdapterDigest | None:
        """The adapter whose request has been held back for too long, if there is one."""
        if not self._max_loras:
            return None
        oldest = waiting.oldest()
        if oldest is None or oldest.group[0] is None or not has_aged(oldest, step_id):
            return None
        return None if self.is_on_device(oldest.group) else oldest.group[0]
