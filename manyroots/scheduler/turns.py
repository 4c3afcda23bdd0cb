"""Whose adapter's turn it is: the cap on distinct adapters, and that none starves under it.

An adapter has a *place* while requests of it run; there are as many as `--max-loras`. Where one
asks for a place and all are taken, the adapter with the fewest rows lends its own: its requests
rest (`resting.py`). How long one waits before that, and how long it may stay, follows from what its
coming costs. Where slots are to spare, its weights come before anybody rests, so that it costs
nothing: it comes at once, for its prompts alone (a *visit*), and rests in its turn till a place is
free. Where none are, the place stands idle while they come: it waits for as long as that takes, and
stays for several times as long.

Knows which adapters are on the device, who waits and who rests; not pages or budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.lanes import Lane
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Rested, Resting

AGING_STEPS = 64
"""A request that has waited for so many steps for its pages keeps others from beginning. And where
as many rest as there are places, and nobody new has begun for so many steps, one has its turn all
the same."""
STAY_STEPS = 16
"""An adapter that has got a place keeps it for so many steps at least. Short beside what a reader
of a stream would notice."""
STAY_SWAPS = 4
"""And for at least so many times what another's coming takes, so that places are mostly in use."""
REST_STEPS = 128
"""One that rests has a turn after so many, if no place was free before."""
NUM_NEXT = 2
"""Of those that rest, so many have their weights brought before a place is free."""
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


@dataclass(frozen=True, slots=True)
class PlaceClaim:
    """An adapter that lacks a place and whose time has come."""

    adapter: AdapterDigest
    due: int
    """The step at which its patience, or its rest, was over."""
    num_requests: int
    """Of it, as far as they count: all that rest, or the one that waits."""
    waiting: Request | None
    """None: its requests rest."""


@dataclass(frozen=True, slots=True)
class PromptVisit:
    """An adapter has a place for its prompts alone."""

    lender: AdapterDigest
    """Who has it back then."""
    since: StepId | None
    """Since when the guest's requests had rested, if they had."""


class AdapterTurns:
    """Decides who may begin, who rests, and which adapters to bring to the device."""

    def __init__(self, adapters: Residency, resting: Resting, patience_steps: int | None) -> None:
        """`patience_steps`: None for what a load takes."""
        self._adapters = adapters
        self._resting = resting
        self._patience_steps = patience_steps
        self._num_places = adapters.limits.max_loras or adapters.limits.num_slots or 0
        """0: as many as are asked for."""
        self._seated_since: dict[AdapterDigest, StepId] = {}
        self._ran_at: dict[AdapterDigest, StepId] = {}
        """The last step in which requests of an adapter ran while others waited."""
        self._promised: dict[AdapterDigest, int] = {}
        """Adapters that a place is kept for, mostly because others rest for them: for how many
        steps, once their weights are there. They do not run."""
        self._first_wanted: dict[AdapterDigest, None] = {}
        """Adapters that others would rest for, were their weights there."""
        self._lent_to: dict[AdapterDigest, AdapterDigest] = {}
        """By adapter that rests: who has its place, or had it first."""
        self._visits: dict[AdapterDigest, PromptVisit] = {}
        """By guest."""
        self._debt = 0
        """Rows that stood idle for others, times COST, less all that ran; nobody is put to rest for
        a waiting one while it is above 0."""
        self._last_step = StepId(0)
        self._line_moved_at = StepId(0)
        """When an adapter that had waited last got a place."""
        self._do_resting_come_first = False
        """Whether who was kept a place for could not begin, till one that rests has gone on: it may
        hold the pages that the other needs."""
        self.is_line_held = False
        """Whether one whose turn it is lacks pages: nobody else begins, so that there will be."""

    # Who may begin

    def is_open(self, adapter: AdapterDigest | None) -> bool:
        """Whether requests of an adapter may be seated now; those of the base model always may."""
        if adapter is None:
            return True
        if self._adapters.readiness(adapter) is not Readiness.READY:
            return False
        if not self._num_places or adapter in self._promised:
            return True
        rested = self._resting.find(adapter)
        is_away = rested is not None and not rested.is_back
        if not is_away and self._adapters.num_seats(adapter):
            return True
        # It needs a place that is free, behind those that were promised one before.
        num_ahead = len(self._promised)
        for other in self._resting.groups() if self._resting else ():
            if other is rested:
                break
            num_ahead += not self._is_back(other) and other.adapter not in self._promised
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
        is_guest = adapter in self._promised or adapter in self._lent_to.values()
        if not self._resting or (adapter is not None and is_guest):
            return 0
        num_back = sum(len(r.requests) for r in self._resting.groups() if self._is_back(r))
        return num_back + self._num_idle()

    def _away(self) -> list[Rested]:
        """Those that rest without a place: it is lent, or they had it back and the last of them
        that ran has ended before there was a row for the others."""
        return [rested for rested in self._resting.groups() if not self._is_back(rested)]

    def _is_back(self, rested: Rested) -> bool:
        return rested.is_back and self._adapters.num_seats(rested.adapter) > 0

    def _num_idle(self) -> int:
        """Rows that stand idle because others rest: those of lenders that their guests do not use,
        and of those that have a place again while their weights are on their way."""
        num_free = self._num_places - self._adapters.slots.num_seated - len(self._promised)
        count = 0
        for rested in self._away():
            guest = self._lent_to[rested.adapter]
            num_used = self._adapters.num_seats(guest)
            if num_used or guest in self._promised:
                count += max(0, len(rested.requests) - num_used)
            elif num_free > 0:
                num_free -= 1
                count += len(rested.requests)
        return count

    def seated(self, adapter: AdapterDigest, step_id: StepId) -> None:
        """A request of an adapter is about to be seated."""
        if not self._num_places or self._adapters.num_seats(adapter):
            return
        if len(self._seated_since) > 2 * self._num_places:
            self._forget_places(step_id)
        if not self._has_kept_place(adapter, step_id):
            self._seated_since[adapter] = step_id
        self._promised.pop(adapter, None)
        if self._resting.find(adapter) is None:
            self._line_moved_at = step_id
        else:
            self._do_resting_come_first = False

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
        is_in_prompt: Callable[[AdapterDigest], bool],
    ) -> dict[AdapterDigest, StepId]:
        """The adapters whose requests must rest now, and since when that counts: what one had
        rested before a visit is not forgotten. `loaded` do not run yet, but wait in no line
        either; `has_room` tells whether there are pages for a request to begin, `is_in_prompt`
        whether an adapter has rows whose prompts are not computed yet."""
        self.is_line_held = False
        self._first_wanted.clear()
        if not self._num_places:
            return {}
        self._count_cost(step_id, num_running)
        for adapter, _ in self._adapters.seated():
            self._ran_at[adapter] = step_id
        if self._promised:
            self._keep_places(waiting, loaded)
        leaving = self._end_visits(step_id, is_in_prompt) if self._visits else {}
        away = [r for r in self._away() if r.adapter not in self._promised] if self._resting else []
        if self._num_free > 0 and not self._do_resting_come_first:
            self._keep_free_place(waiting, loaded, away, step_id)
        claims = self._claims(waiting, loaded, away[max(0, self._num_free) :], step_id)
        victims = self._settled(step_id, leaving) if claims else []
        swapped = self._swaps(claims, victims, len(away), step_id, has_room)
        return leaving | dict.fromkeys(swapped, step_id)

    @property
    def _num_free(self) -> int:
        """Places that nobody has or was promised; below 0 while who must rest still has its own."""
        return self._num_places - self._adapters.slots.num_seated - len(self._promised)

    def _end_visits(
        self, step_id: StepId, is_in_prompt: Callable[[AdapterDigest], bool]
    ) -> dict[AdapterDigest, StepId]:
        """Guests whose prompts are computed rest, and those who lent them a place have it back;
        unless there is a place for both, or the guest has many more rows, or may go on."""
        leaving = {}
        num_free = self._num_free
        for guest, visit in list(self._visits.items()):
            if guest in self._promised or is_in_prompt(guest):
                continue
            lender = visit.lender
            rested = self._resting.find(lender)
            num_rows = self._adapters.num_seats(guest)
            if rested is not None and self._may_go_on(guest, len(rested.requests), step_id):
                continue
            del self._visits[guest]
            if rested is None or rested.is_back or lender in self._promised:
                continue
            if num_rows >= 2 * len(rested.requests) or num_free >= len(self._away()):
                continue
            self._promised[lender] = self._stay_steps
            if num_rows:
                self._lent_to[guest] = lender
                leaving[guest] = step_id if visit.since is None else visit.since
        return leaving

    def _may_go_on(self, guest: AdapterDigest, num_lenders: int, step_id: StepId) -> bool:
        """Whether a guest keeps a place behind its prompts, before those whose it is: for as long
        as it would have had it without them, if it has fewer rows and what may stand idle is not
        used up. A short request so ends without a pause."""
        num_rows = self._adapters.num_seats(guest)
        is_new = num_rows > 0 and step_id - self._seated_since[guest] < self._stay_steps
        return is_new and num_rows < num_lenders and self._debt <= 0

    def _swaps(
        self,
        claims: list[PlaceClaim],
        victims: list[tuple[AdapterDigest, int]],
        num_away: int,
        step_id: StepId,
        has_room: Callable[[Request], bool],
    ) -> Iterator[AdapterDigest]:
        """Who rests for whom, in the order of the claims."""
        debt, left = self._debt, iter(victims)
        victim, num_rows = next(left, (None, 0))
        for claim in claims:
            if victim is None:
                return
            request = claim.waiting
            is_gain = request is None and 2 * num_rows <= claim.num_requests
            if not is_gain and (debt > 0 or claim.due > step_id):
                continue
            rested = self._resting.find(claim.adapter)
            is_crowded = rested is None and num_away >= self._num_places
            if is_crowded and step_id - self._line_moved_at <= AGING_STEPS:
                continue
            if self._has_spare and not self._is_there(claim.adapter):
                if self._can_come_first(claim.adapter):
                    self._first_wanted[claim.adapter] = None
                continue
            if request is not None and not has_room(request):
                if has_aged(request, step_id):
                    self.is_line_held = True
                    return
                continue
            num_idle_steps = self._idle_steps(claim.adapter)
            debt += COST * num_rows * num_idle_steps
            num_away += rested is None
            self._promised[claim.adapter] = self._stay_steps
            if request is not None and num_idle_steps == 0:
                since = None if rested is None else rested.since
                self._visits[claim.adapter] = PromptVisit(victim, since)
            self._lent_to[victim] = claim.adapter
            # It does not keep the place: when it is back it has come.
            self._ran_at.pop(victim, None)
            yield victim
            victim, num_rows = next(left, (None, 0))

    # What an adapter's coming costs

    def _is_there(self, adapter: AdapterDigest) -> bool:
        slot = self._adapters.slots.find(adapter)
        return slot is not None and not slot.is_loading

    @property
    def _has_spare(self) -> bool:
        """Whether there are slots beyond the places: weights can come before anyone must rest."""
        num_obtainable = self._adapters.num_obtainable
        num_seated = self._adapters.slots.num_seated
        return num_obtainable is None or num_obtainable + num_seated > self._num_places

    def _can_come_first(self, adapter: AdapterDigest) -> bool:
        """Whether one of those is left for an adapter."""
        if self._adapters.slots.find(adapter) is not None:
            return True  # it is on its way
        num_obtainable = self._adapters.num_obtainable
        num_taken = len(self._promised) + len(self._visits) + len(self._first_wanted)
        return num_obtainable is None or num_obtainable > num_taken

    def _idle_steps(self, adapter: AdapterDigest) -> int:
        """Steps for which a place would stand idle if an adapter got it now: till the last step
        that uses its slot is over, and then for the load."""
        return 0 if self._is_there(adapter) else 1 + self._adapters.load_steps(adapter)

    @property
    def _stay_steps(self) -> int:
        idle_steps = 0 if self._has_spare else 1 + self._adapters.host_load_steps
        return max(STAY_STEPS, STAY_SWAPS * idle_steps)

    def _patience(self, adapter: AdapterDigest, waiting: WaitingQueue) -> int:
        """Steps for which an adapter waits for a place that is free."""
        steps = self._patience_steps
        if steps is None:
            if self._has_spare and not waiting.packs:
                return 0
            steps = self._idle_steps(adapter)
        return 1 + steps * (PACK_PATIENCE if waiting.packs else 1)

    # Places that are kept, and claims to others'

    def _keep_free_place(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        away: list[Rested],
        step_id: StepId,
    ) -> None:
        """Free places are for those that rest. But one is kept for who has waited for longer than
        any of them; and where others' requests are so short that their slots are used in every step
        and their places never for long, for who has waited for long."""
        is_one_left = self._num_free > len(away)
        for request in self._impatient(waiting, loaded, step_id):
            adapter = request.group[0]
            assert adapter is not None
            if self._resting.find(adapter) is not None:
                continue
            if is_one_left:
                has_waited = step_id - request.waiting_since > STAY_STEPS
                is_first = has_waited and self._adapters.slots.find(adapter) is None
            else:
                is_first = request.waiting_since < away[0].since
            if is_first:
                self._promised[adapter] = self._stay_steps
                return

    def _count_cost(self, step_id: StepId, num_running: int) -> None:
        num_steps, self._last_step = step_id - self._last_step, step_id
        self._debt = max(
            self._debt - num_steps * num_running, -SAVED_STEPS * COST * max(num_running, 1)
        )
        if not self._resting:
            self._lent_to.clear()
            self._do_resting_come_first = False
            return
        self._debt += COST * self._num_idle()

    def forgo(self) -> bool:
        """Nobody runs who could make room for those that places are kept for: those that rest
        have them back. False if there are none."""
        if not self._promised:
            return False
        self._promised.clear()
        self._visits.clear()
        self._do_resting_come_first = bool(self._resting)
        return True

    def _keep_places(self, waiting: WaitingQueue, loaded: Iterable[Request]) -> None:
        """Places are kept for some: not if they want none any more, and not for ever."""
        of_loaded = {request.group[0] for request in loaded}
        for adapter in list(self._promised):
            if self._adapters.readiness(adapter) is Readiness.READY:
                self._promised[adapter] -= 1
            is_wanted = (
                adapter in waiting.lanes
                or self._resting.find(adapter) is not None
                or adapter in of_loaded
            )
            if not is_wanted or self._promised[adapter] < 0:
                del self._promised[adapter]

    def _settled(
        self, step_id: StepId, leaving: Collection[AdapterDigest]
    ) -> list[tuple[AdapterDigest, int]]:
        """Adapters that have had a place for some time, with their rows: those with the fewest
        first, of those whoever has had it for longest."""
        since, stay = self._seated_since, self._stay_steps
        settled = [
            (seats, since[adapter], adapter)
            for adapter, seats in self._adapters.seated()
            if step_id - since[adapter] >= stay
            and adapter not in leaving
            and adapter not in self._visits
            and ((rested := self._resting.find(adapter)) is None or rested.is_back)
        ]
        settled.sort(key=lambda each: each[:2])
        return [(adapter, seats) for seats, _, adapter in settled]

    def _claims(
        self,
        waiting: WaitingQueue,
        loaded: Iterable[Request],
        lacking: list[Rested],
        step_id: StepId,
    ) -> list[PlaceClaim]:
        """Of adapters that lack a place, those whose time has come: each kind in its own order,
        and of the two first who is due first. `lacking`: of those that rest."""
        resting = [
            PlaceClaim(rested.adapter, rested.since + REST_STEPS, len(rested.requests), None)
            for rested in lacking
            if step_id - rested.since >= self._stay_steps
            and not self._adapters.has_place(rested.adapter)
        ]
        resting.reverse()
        # Who has just lent its place has it back soon: its line must not take another's for that.
        may_come = {
            rested.adapter for rested in lacking if step_id - rested.since >= self._stay_steps
        }
        claims: list[PlaceClaim] = []
        for request in self._impatient(waiting, loaded, step_id):
            adapter = request.group[0]
            assert adapter is not None
            is_resting = self._resting.find(adapter) is not None
            if (is_resting and adapter not in may_come) or self._adapters.has_place(adapter):
                continue
            due = request.waiting_since + self._patience(adapter, waiting)
            while resting and resting[-1].due <= due:
                claims.append(resting.pop())
            claims.append(PlaceClaim(adapter, due, 1, request))
        return claims + resting[::-1]

    def _impatient(
        self, waiting: WaitingQueue, loaded: Iterable[Request], step_id: StepId
    ) -> Iterator[Request]:
        """Of adapters that have waited beyond their patience, each one's next request."""
        num_lanes = self._num_places + len(self._resting.groups()) + 2
        for request in (*loaded, *(lane.head for lane in waiting.first_lanes(num_lanes))):
            adapter = request.group[0]
            if (
                adapter is not None
                and adapter not in self._promised
                and not self._adapters.num_seats(adapter)
                and step_id - request.waiting_since >= self._patience(adapter, waiting)
            ):
                yield request

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
        is_any_promised = bool(self._promised or self._first_wanted)
        are_adapters_waited_for = len(waiting.lanes) > (None in waiting.lanes)
        if not (is_any_promised or are_adapters_waited_for or loaded or self._resting.by_adapter):
            return
        most = self._adapters.num_obtainable
        if most is None:
            most = len(waiting.lanes)
        # What a place is kept for may have been unloaded since; the next step sees to it.
        known = self._adapters.registry.contents
        lenders = (visit.lender for visit in self._visits.values())
        promised = (*self._promised, *lenders, *self._first_wanted)
        wanted = {adapter: None for adapter in promised if adapter in known}
        resting = [rested.adapter for rested in self._resting.groups()]
        num_next = max(0, self._num_free) + NUM_NEXT
        wanted |= dict.fromkeys(resting[:num_next])
        holders = (request.group[0] for request in loaded)
        wanted |= dict.fromkeys(adapter for adapter in holders if adapter is not None)
        count = self._num_places + most + len(without_room) + 1
        first = self._packed(waiting, count) if waiting.packs else waiting.first_lanes(count)
        lanes = [lane.adapter for lane in first]
        lanes.sort(key=without_room.__contains__)
        wanted |= dict.fromkeys(adapter for adapter in lanes if adapter is not None)
        wanted |= dict.fromkeys(resting[num_next:])
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
