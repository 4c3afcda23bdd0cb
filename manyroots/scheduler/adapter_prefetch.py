"""Which adapters' weights to bring to the device before their requests run, the most urgent first.

Takes who has a place and no weights yet, who rests and who waits; tells `lora` what is wanted. As
many are as there are slots that nobody runs in; those beyond come as far as host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from manyroots.ids import AdapterDigest
from manyroots.lora.residency import Residency
from manyroots.scheduler.lanes import Lane
from manyroots.scheduler.places import AdapterPlaces
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Resting

NUM_NEXT = 2
"""Of those that rest, so many have their weights brought before a place is free."""
PACK_CHOICE = 4
"""With the pack policy the adapter with the most requests is next, of so many times those that
could be on the device, the oldest first: a load serves as many as it can."""


class AdapterPrefetch:
    """Asks for weights."""

    def __init__(self, adapters: Residency, resting: Resting, places: AdapterPlaces) -> None:
        self._adapters = adapters
        self._resting = resting
        self._places = places
        self._first: dict[AdapterDigest, None] = {}
        """Adapters that others would rest for, were their weights there. Of this step."""

    def begin_step(self) -> None:
        self._first.clear()

    def ask_first(self, adapter: AdapterDigest) -> None:
        """Others will rest for an adapter once its weights are there: they come next, if there is
        a slot for them."""
        if self.has_slot or self._adapters.slots.find(adapter) is not None:
            self._first[adapter] = None

    @property
    def has_slot(self) -> bool:
        """Whether there is a slot beyond those of adapters that come, or come back, next."""
        num_obtainable = self._adapters.num_obtainable
        num_taken = len(self._places.kept()) + len(self._places.visited()) + len(self._first)
        return num_obtainable is None or num_obtainable > num_taken

    def ask(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        without_room: set[AdapterDigest | None],
    ) -> None:
        """Bring what requests that do not run need to the device: first who has a place, then
        what those need that hold pages (they rest, or have loaded some), last what has no room
        for its pages, since its weights would lie idle."""
        are_adapters_waited_for = len(waiting.lanes) > (None in waiting.lanes)
        kept = [place.holder for place in self._places.kept()]
        if not (kept or are_adapters_waited_for or loaded or self._resting.by_adapter):
            return
        most = self._adapters.num_obtainable
        if most is None:
            most = len(waiting.lanes)
        lenders = (place.lender for place in self._places.visited())
        # What a place is kept for may have been unloaded since; the next step sees to it.
        known = self._adapters.registry.contents
        wanted = [adapter for adapter in (*kept, *lenders, *self._first) if adapter in known]
        resting = [rested.adapter for rested in self._resting.groups()]
        num_next = len(self._places.free()) + NUM_NEXT
        wanted += resting[:num_next]
        wanted += _adapters_of(loaded)
        count = len(self._places) + most + len(without_room) + 1
        first = self._packed(waiting, count) if waiting.packs else waiting.first_lanes(count)
        lanes = [lane.adapter for lane in first]
        lanes.sort(key=without_room.__contains__)
        wanted += [adapter for adapter in lanes if adapter is not None]
        wanted += resting[num_next:]
        self._prepare(dict.fromkeys(wanted), most)

    def _prepare(self, wanted: Iterable[AdapterDigest], most: int) -> None:
        unseated = [adapter for adapter in wanted if not self._adapters.num_seats(adapter)]
        # Those beyond come as far as the host. Not the ones that have a slot: it is up for others.
        beyond = [d for d in unseated[most:] if self._adapters.slots.find(d) is None]
        if unseated:
            limit = self._adapters.limits.max_loras or None
            self._adapters.prepare([*unseated[:most], *beyond][:limit])

    def _packed(self, waiting: WaitingQueue, count: int) -> list[Lane]:
        """With the pack policy: first what is on the device, then what the most wait for."""
        lanes = waiting.lanes
        kept = [lanes[digest] for digest in self._adapters.slots.by_owner if digest in lanes]
        others = sorted(waiting.first_lanes(PACK_CHOICE * count), key=len, reverse=True)
        return list(dict.fromkeys([*kept, *others]))


def _adapters_of(requests: Iterable[Request]) -> list[AdapterDigest]:
    adapters = (request.group[0] for request in requests)
    return [adapter for adapter in adapters if adapter is not None]
