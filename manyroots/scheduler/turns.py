"""Whose adapter's turn it is: the cap on distinct adapters, and that none starves under it.

An adapter has a *place* while requests of it run; there are as many as `--max-loras`. One that asks
for a place and finds none waits till one is free, or till its patience is over. Then the adapter
with the fewest rows lends its place: its requests rest (`resting.py`) till the guest has ended or
has stayed for STAY_STEPS, if they are many more than the guest's. Nobody else is held back.

Knows which adapters are on the device, who waits and who rests; not pages or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.lanes import Lane
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Rested, Resting

AGING_STEPS = 64
"""A request that has waited for so many steps for its pages keeps others from beginning."""
STAY_STEPS = 16
"""An adapter that has got a place keeps it for so many steps at least; and one that rests has it
back after as many, if it has twice the rows of whoever must rest for that. Long beside the steps
that a load takes, short beside what a reader of a stream would notice."""
GAP_STEPS = 4
"""An adapter none of whose requests runs for so few steps has kept its place: with short outputs
all may end at once, and the next begin."""
COST = 40
"""While anyone rests, one row in so many may stand idle for it, on average. It is what resting
costs the others: 2.4%."""
SAVED_STEPS = 8
"""What was not used of that is saved up, as far as to let all rows stand idle for so many steps."""

PACK_PATIENCE = 4
"""With the pack policy patience is so many times as long: what is on the device is used first."""
PACK_CHOICE = 4
"""With the pack policy the adapter with the most requests is next, of so many times those that
could be on the device, the oldest first: a load serves as many as it can."""


def has_aged(request: Request, step_id: StepId) -> bool:
    return step_id - request.waiting_since > AGING_STEPS


class AdapterTurns:
    """Decides who may begin, who rests, and which adapters to bring to the device."""

    def __init__(self, adapters: Residency, resting: Resting, patience_steps: int) -> None:
        self._adapters = adapters
        self._resting = resting
        self._patience_steps = patience_steps
        self._num_places = adapters.limits.max_loras or adapters.limits.num_slots or 0
        """0: as many as are asked for."""
        self._seated_since: dict[AdapterDigest, StepId] = {}
        self._ran_at: dict[AdapterDigest, StepId] = {}
        """The last step in which requests of an adapter ran while others waited."""
        self._next: AdapterDigest | None = None
        """The adapter that the next free place is for, because others rest for it."""
        self._first_wanted: AdapterDigest | None = None
        """The adapter that others would rest for, were its weights there."""
        self._num_steps_left = 0
        """How long the place is kept for it once its weights are there."""
        self._guest: AdapterDigest | None = None
        """The last one that others rested for."""
        self._lent_to: dict[AdapterDigest, AdapterDigest] = {}
        """By adapter that rests: who has its place, or had it first."""
        self._was_for_rested = False
        """Whether that one had rested itself: those that wait and those that rest take turns."""
        self._debt = 0
        """Rows that stood idle for others, times COST, less all that ran; nobody is put to rest for
        a waiting one while it is above 0."""
        self._last_step = StepId(0)
        self.is_line_held = False
        """Whether one whose turn it is lacks pages: nobody else begins, so that there will be."""

    # Who may begin

    def is_open(self, adapter: AdapterDigest | None) -> bool:
        """Whether requests of an adapter may be seated now; those of the base model always may."""
        if adapter is None:
            return True
        if self._adapters.readiness(adapter) is not Readiness.READY:
            return False
        if not self._num_places or adapter == self._next:
            return True
        rested = self._resting.find(adapter)
        is_away = rested is not None and not rested.is_back
        if not is_away and self._adapters.num_seats(adapter):
            return True
        # It needs a place that is free, behind those that were promised one before.
        num_ahead = int(self._next is not None and not self._adapters.num_seats(self._next))
        for other in self._resting.groups() if self._resting else ():
            if other is rested:
                break
            num_ahead += not self._is_back(other) and other.adapter != self._next
        return self._num_places - self._adapters.slots.num_seated > num_ahead

    def open_lanes(self, waiting: WaitingQueue) -> dict[AdapterDigest | None, None]:
        """Adapters that can be used in this step, of those that requests wait for."""
        lanes, on_device = waiting.lanes, self._adapters.slots.by_owner
        is_open: dict[AdapterDigest | None, None] = {None: None} if None in lanes else {}
        if len(lanes) > len(is_open):
            # Adapters that are wanted may be many more than those that are there, or many fewer.
            few = lanes if len(lanes) < len(on_device) else on_device
            is_open |= dict.fromkeys(d for d in few if d in lanes and self.is_open(d))
        return is_open

    def num_kept_rows(self, adapter: AdapterDigest | None) -> int:
        """Rows that a new request of an adapter leaves free, because those that rest will need
        them: all who are back, and of the others those whose guest would leave too few."""
        if not self._resting or (adapter is not None and adapter in (self._next, self._guest)):
            return 0
        return sum(
            len(rested.requests) if rested.is_back else self._num_idle(rested)
            for rested in self._resting.groups()
        )

    def _away(self) -> list[Rested]:
        """Those that rest without a place: it is lent, or they had it back and the last of them
        that ran has ended before there was a row for the others."""
        return [rested for rested in self._resting.groups() if not self._is_back(rested)]

    def _is_back(self, rested: Rested) -> bool:
        return rested.is_back and self._adapters.num_seats(rested.adapter) > 0

    def _num_idle(self, rested: Rested) -> int:
        """Rows that stand idle because these rest: those that their guest does not use."""
        guest = self._lent_to[rested.adapter]
        num_used = self._adapters.num_seats(guest)
        is_lent = num_used or guest == self._next or self._adapters.has_place(rested.adapter)
        return max(0, len(rested.requests) - num_used) if is_lent else 0

    def seated(self, adapter: AdapterDigest, step_id: StepId) -> None:
        """A request of an adapter is about to be seated."""
        if not self._num_places or self._adapters.num_seats(adapter):
            return
        if len(self._seated_since) > 2 * self._num_places:
            self._forget_places(step_id)
        if not self._has_kept_place(adapter, step_id):
            self._seated_since[adapter] = step_id
        if adapter == self._next:
            self._next = None

    def _has_kept_place(self, adapter: AdapterDigest, step_id: StepId) -> bool:
        ran_at = self._ran_at.get(adapter)
        return ran_at is not None and step_id - ran_at <= GAP_STEPS

    def _forget_places(self, step_id: StepId) -> None:
        seated = dict(self._adapters.seated())
        self._seated_since = {
            adapter: since
            for adapter, since in self._seated_since.items()
            if adapter in seated or self._has_kept_place(adapter, step_id)
        }
        self._ran_at = {d: step for d, step in self._ran_at.items() if d in self._seated_since}

    def returning(self) -> list[Request]:
        """Who rests and may run again, once there is a row for it."""
        return [
            request
            for rested in self._resting.groups()
            if self.is_open(rested.adapter)
            for request in rested.requests
        ]

    # Who rests

    def who_rests(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        step_id: StepId,
        num_running: int,
        has_room: Callable[[Request], bool],
    ) -> AdapterDigest | None:
        """The adapter whose requests must rest now, if any must. `loaded` do not run yet, but wait
        in no line either; `has_room` tells whether there are pages for a request to begin."""
        self.is_line_held = False
        self._first_wanted = None
        if not self._num_places:
            return None
        self._count_cost(step_id, num_running)
        for adapter, _ in self._adapters.seated():
            self._ran_at[adapter] = step_id
        if self._next is not None:
            self._keep_place(waiting, loaded)
            return None
        away = self._away() if self._resting else []
        # Free places are first for those that rest.
        if self._adapters.slots.num_seated + len(away) < self._num_places:
            self._keep_free_place(waiting, loaded, step_id)
            if self._next is not None:
                return None
        rested = away[0] if away else None
        if rested is not None:
            if self._adapters.has_place(rested.adapter):
                return None  # it has but to come back
            victim = self._fewest_rows(step_id, STAY_STEPS)
            is_gain = victim is not None and 2 * victim[1] <= len(rested.requests)
            if is_gain and step_id - rested.since >= STAY_STEPS:
                return self._swap(victim, rested.adapter)
        # Who has just come is left alone: it may end before it could have been brought back.
        victim = self._fewest_rows(step_id, max(STAY_STEPS, self._patience_steps))
        if victim is None or self._debt > 0:
            return None
        if rested is not None and step_id - rested.since <= self._patience_steps:
            rested = None
        request = self._longest_waiting(
            waiting, loaded, step_id, lambda adapter: not self._adapters.has_place(adapter)
        )
        if request is None or (rested is not None and not self._was_for_rested):
            return None if rested is None else self._swap(victim, rested.adapter)
        if not has_room(request):
            self.is_line_held = True
            return None
        return self._swap(victim, request.group[0])

    def _keep_free_place(
        self, waiting: WaitingQueue, loaded: Collection[Request], step_id: StepId
    ) -> None:
        """Where others' requests are so short that their slots are used in every step and their
        places never for long, one that is free is kept for who has waited beyond its patience."""
        slots = self._adapters.slots
        request = self._longest_waiting(waiting, loaded, step_id, lambda d: slots.find(d) is None)
        if request is not None:
            self._next = self._guest = request.group[0]
            self._num_steps_left = STAY_STEPS

    def _swap(
        self, victim: tuple[AdapterDigest, int] | None, adapter: AdapterDigest | None
    ) -> AdapterDigest | None:
        """The next place is for `adapter`, and the victim must rest; once its weights are there, if
        they can be brought before."""
        assert victim is not None
        assert adapter is not None
        if self._adapters.is_coming(adapter):
            self._first_wanted = adapter
            return None
        self._was_for_rested = self._resting.find(adapter) is not None
        self._next = self._guest = self._lent_to[victim[0]] = adapter
        self._num_steps_left = STAY_STEPS
        self._ran_at.pop(victim[0], None)  # it does not keep the place: when it is back it has come
        return victim[0]

    def _count_cost(self, step_id: StepId, num_running: int) -> None:
        num_steps, self._last_step = step_id - self._last_step, step_id
        self._debt = max(
            self._debt - num_steps * num_running, -SAVED_STEPS * COST * max(num_running, 1)
        )
        if not self._resting:
            self._lent_to.clear()
            return
        self._debt += COST * sum(map(self._num_idle, self._away()))

    def forgo(self) -> bool:
        """Nobody runs who could make room for the one that a place is kept for: those that rest
        have it back. False if there is none."""
        if self._next is None:
            return False
        self._next = None
        return True

    def _keep_place(self, waiting: WaitingQueue, loaded: Iterable[Request]) -> None:
        """A place is kept for someone: not if it wants none any more, and not for ever."""
        adapter = self._next
        assert adapter is not None
        if self._adapters.readiness(adapter) is Readiness.READY:
            self._num_steps_left -= 1
        is_wanted = (
            adapter in waiting.lanes
            or self._resting.find(adapter) is not None
            or any(request.group[0] == adapter for request in loaded)
        )
        if not is_wanted or self._num_steps_left < 0:
            self._next = None

    def _fewest_rows(self, step_id: StepId, num_steps: int) -> tuple[AdapterDigest, int] | None:
        """Of the adapters that have had a place for some time, the one with the fewest rows."""
        settled = [
            (adapter, seats)
            for adapter, seats in self._adapters.seated()
            if step_id - self._seated_since[adapter] >= num_steps
            and ((rested := self._resting.find(adapter)) is None or rested.is_back)
        ]
        return min(settled, key=lambda pair: pair[1], default=None)

    def _longest_waiting(
        self,
        waiting: WaitingQueue,
        loaded: Iterable[Request],
        step_id: StepId,
        lacks_place: Callable[[AdapterDigest], bool],
    ) -> Request | None:
        """Of the adapters that wait for a place beyond their patience, the first one's request."""
        num_lanes = self._num_places + len(self._resting.groups()) + 2
        heads = [*loaded, *(lane.head for lane in waiting.first_lanes(num_lanes))]
        patience = self._patience_steps * (PACK_PATIENCE if waiting.packs else 1)
        for request in heads:
            adapter = request.group[0]
            if (
                adapter is not None
                and step_id - request.waiting_since > patience
                and not self._adapters.num_seats(adapter)
                and self._resting.find(adapter) is None
                and lacks_place(adapter)
            ):
                return request
        return None

    # Bringing adapters

    def prepare(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        without_room: set[AdapterDigest | None],
    ) -> None:
        """Bring what requests that do not run need to the device: first what was promised a place,
        then what those need that hold pages (they rest, or have loaded some), last what has no room
        for its pages, since its weights would lie idle."""
        is_any_promised = self._next is not None or self._first_wanted is not None
        are_adapters_waited_for = len(waiting.lanes) > (None in waiting.lanes)
        if not (is_any_promised or are_adapters_waited_for or loaded or self._resting.by_adapter):
            return
        most = self._adapters.num_obtainable
        if most is None:
            most = len(waiting.lanes)
        # What a place is kept for may have been unloaded since; the next step sees to it.
        known = self._adapters.registry.contents
        promised = (self._next, self._first_wanted)
        wanted = {adapter: None for adapter in promised if adapter in known}
        wanted |= dict.fromkeys(rested.adapter for rested in self._resting.groups())
        holders = (request.group[0] for request in loaded)
        wanted |= dict.fromkeys(adapter for adapter in holders if adapter is not None)
        count = self._num_places + most + len(without_room) + 1
        first = self._packed(waiting, count) if waiting.packs else waiting.first_lanes(count)
        lanes = [lane.adapter for lane in first]
        lanes.sort(key=without_room.__contains__)
        wanted |= dict.fromkeys(adapter for adapter in lanes if adapter is not None)
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
