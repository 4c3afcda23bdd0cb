"""Whose adapter's turn it is: who may begin, and who rests for whom.

Where an adapter asks for a place and all are taken, the one with the fewest rows lends its own:
its requests rest. Where slots are to spare, the newcomer's weights come before anybody rests, so
that it costs nothing: it comes at once, for its prompts alone (a *visit*), and rests in its turn
till a place is free. Where none are, the place stands idle while they come: it waits for as long as
that takes, and stays for several times as long. Where places are free and rows are not, one row is
lent, and no place.

`places.py` knows who has which place, `claims.py` who lacks one, `swap_costs.py` what a change
costs, `row_loans.py` who lends a row; here they are weighed against each other. Knows nothing of
pages and budgets of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.outcomes import Readiness
from manyroots.lora.residency import Residency
from manyroots.scheduler.adapter_prefetch import AdapterPrefetch
from manyroots.scheduler.claims import REST_STEPS, Claims, PlaceClaim
from manyroots.scheduler.lanes import priority_of
from manyroots.scheduler.places import AdapterPlace, AdapterPlaces
from manyroots.scheduler.queue import WaitingQueue
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Rested, Resting
from manyroots.scheduler.row_loans import RowLoans
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.swap_costs import STAY_STEPS, IdleBudget, SwapCosts

AGING_STEPS = 64
"""A request that has waited for so many steps for its pages keeps others from beginning. And where
as many rest as there are places, and nobody new has begun for so many steps, one has its turn all
the same."""

MIN_VISIT_STEPS = 4
"""A visitor with fewer rows than who lent the place stays for so many steps behind its prompts, and
for STAY_STEPS while the budget of idle rows is not spent. So a short request ends without a pause,
and one that had rested for long goes on for a few tokens at least."""

HasRoom = Callable[[Request], bool]
"""Whether there are pages for a request to begin."""


class PutToRest(Protocol):
    """Who makes requests rest."""

    def rest(self, adapter: AdapterDigest, since: StepId, place: int) -> None:
        """All of an adapter, which lends a place by its number."""

    def lend(self, request: Request, since: StepId) -> None:
        """One, which lends its row."""


def has_aged(request: Request, step_id: StepId) -> bool:
    return step_id - request.waiting_since > AGING_STEPS


def _yielding(
    claim: PlaceClaim,
    settled: list[AdapterPlace],
    importance: dict[AdapterDigest | None, int] | None,
) -> list[AdapterPlace]:
    """Whose places a claim may have, the first one first. Where importance counts, nobody rests for
    one who waits and is less important, and the least important does. Those that rest go by their
    bound alone."""
    if importance is None or claim.waiting is None:
        return settled
    own = priority_of(claim.waiting)
    found = [(importance.get(place.holder, own), place) for place in settled]
    found.sort(key=lambda each: -each[0])
    return [place for of_holder, place in found if of_holder >= own]


class AdapterTurns:
    """Decides who may begin, who rests, and which adapters to bring to the device."""

    def __init__(
        self,
        adapters: Residency,
        resting: Resting,
        rows: Rows,
        patience_steps: int | None,
        *,
        by_priority: bool,
    ) -> None:
        """`patience_steps`: None for what a load takes. `by_priority`: whether importance counts
        before all else."""
        self._adapters = adapters
        self.resting = resting
        self.rows = rows
        num_places = adapters.limits.max_loras or adapters.limits.num_slots or 0
        self.places = AdapterPlaces(num_places, adapters, resting)
        self._costs = SwapCosts(adapters, num_places, patience_steps)
        self._budget = IdleBudget()
        self._claims = Claims(adapters, resting, self.places, self._costs)
        self._loans = RowLoans(resting, rows, self.places)
        self._prefetch = AdapterPrefetch(adapters, resting, self.places)
        self._line_moved_at = StepId(0)
        """When an adapter that had waited last got a place."""
        self._is_slot_owed = False
        """Whether those that are overdue need the slots that are left: nobody else comes."""
        self._by_priority = by_priority
        self.keeps_rows = not by_priority
        """Whether those that rest have their rows when they are back, whoever waits: not where who
        waits may be more important."""
        self.step_id = StepId(0)
        """The last step in which anybody waited or rested."""
        self.is_line_held = False
        """Whether one whose turn it is lacks pages: nobody else begins, so that there will be."""

    # Who may begin

    def is_open(self, adapter: AdapterDigest | None) -> bool:
        """Whether requests of an adapter may be seated now; those of the base model always may."""
        if adapter is None:
            return True
        if self._adapters.readiness(adapter) is not Readiness.READY:
            return False
        if not len(self.places) or self.places.of(adapter) is not None:
            return True
        # Places that are free were offered to those that rest before.
        return self.resting.find(adapter) is None and bool(self.places.free())

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
        """Rows that a new request of an adapter leaves free, for those that rest or are about to
        come."""
        if not (self.resting or self.places.num_reserved_rows) or not self.keeps_rows:
            return 0
        num_kept = self.places.num_rows_of_others(adapter)
        place = None if adapter is None else self.places.of(adapter)
        if self.resting.loans and (place is None or not place.has_row):
            num_kept += self._loans.num_in_line(self.is_open)
        return num_kept

    def has_row(self, request: Request) -> bool:
        """Whether there is a row for a request that has lent its own."""
        return self._loans.has_row(request.group[0])

    def seated(self, adapter: AdapterDigest, step_id: StepId) -> None:
        """A request of an adapter is about to be seated."""
        has_begun = len(self.places) and self.places.begin(adapter, step_id)
        if has_begun and self.resting.find(adapter) is None:
            self._line_moved_at = step_id

    def returning(self) -> list[Request]:
        """Who rests and may run again, once there is a row for it."""
        back = [
            request
            for rested in self.resting.groups()
            if self.is_open(rested.adapter)
            for request in rested.requests
        ]
        return back + [request for request in self.resting.loans if self.is_open(request.group[0])]

    def prepare(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        without_room: set[AdapterDigest | None],
    ) -> None:
        """Bring what requests that do not run need to the device."""
        self._prefetch.ask(waiting, (*loaded, *self.resting.loans), without_room)

    # Who rests

    def take_turns(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        step_id: StepId,
        has_room: HasRoom,
        put_to_rest: PutToRest,
    ) -> None:
        """Give places and rows to those whose turn it is, and put to rest who must make them.
        `loaded` do not run yet, but wait in no line either."""
        self.step_id = step_id
        self.is_line_held = self._is_slot_owed = False
        self._prefetch.begin_step()
        if not len(self.places):
            return
        self._budget.count(step_id, len(self.rows.running), self.places.num_idle_rows())
        self.places.note_running(step_id)
        if self.resting.loans:
            loaded = (*loaded, *self.resting.loans)
            self._loans.keep_places(self._costs.stay_steps)
        self._end_keeping(waiting, loaded)
        self._end_visits(step_id, put_to_rest)
        self._fill_free_places(waiting, loaded, step_id)
        self._give_rows(waiting, loaded, step_id, has_room, put_to_rest)
        self._give_places(waiting, loaded, step_id, has_room, put_to_rest)
        if self.resting.loans:
            # Last, since whose adapter rests in this step has no row to hand on.
            self._loans.hand_on(step_id, self._costs.stay_steps, self.is_open, put_to_rest.lend)

    def _give_places(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        step_id: StepId,
        has_room: HasRoom,
        put_to_rest: PutToRest,
    ) -> None:
        """Those who claim a place have it, in their order, from whom it can be taken."""
        settled: list[AdapterPlace] | None = None
        owed: list[AdapterPlace] = []
        importance: dict[AdapterDigest | None, int] | None = None
        is_crowded = False
        free: list[AdapterPlace] = []
        for claim in self._claims.in_order(waiting, loaded, step_id):
            if settled is None:
                settled = self.places.settled(step_id, self._costs.stay_steps)
                settled = [place for place in settled if place not in owed]
                importance = self._importance()
                is_crowded = self._is_crowded(step_id)
                free = self._free_places()
            if claim.is_newcomer and is_crowded:
                continue
            comes_freely = claim.is_newcomer and bool(free)
            if comes_freely and not self._costs.is_there(claim.adapter):
                continue  # with a place free its weights come as any others do
            if comes_freely:
                place: AdapterPlace | None = free[0]
            else:
                yielding = _yielding(claim, settled, importance)
                place = self._place_for(claim, settled, yielding, step_id)
            if place is None:
                continue
            if not self._can_come(claim, step_id, has_room):
                if self.is_line_held:
                    return
                if claim.rested is not None and claim.is_overdue(step_id):
                    # Till its weights are there the holder goes on, and nobody else comes between.
                    owed.append(self.places.lent(claim.rested))
                    settled = [place for place in settled if place not in owed]
            elif not comes_freely:
                self._swap(claim, place, step_id, put_to_rest)
                settled = None  # others hold places now
            elif self._lacks_row(claim.adapter):
                self.places.keep(place, claim.adapter, self._costs.stay_steps)
                self._give_row(place, step_id, put_to_rest)
                free.remove(place)

    def _end_keeping(self, waiting: WaitingQueue, loaded: Collection[Request]) -> None:
        """Places are kept for some: not if they want none any more, and not for ever."""
        of_loaded = {request.group[0] for request in loaded}
        for place in self.places.kept():
            adapter = place.holder
            assert adapter is not None
            assert place.kept_steps is not None
            if self._adapters.readiness(adapter) is Readiness.READY:
                place.kept_steps -= 1
            is_resting = self.resting.find(adapter) is not None
            is_wanted = adapter in waiting.lanes or is_resting or adapter in of_loaded
            if not is_wanted or place.kept_steps < 0:
                self.places.vacate(place)

    def forgo(self) -> bool:
        """Nobody runs who could make room for those that places are kept for: those that rest
        have them back. False if there are none."""
        kept = [p for p in self.places.kept() if p.holder and not self.resting.find(p.holder)]
        for place in kept:
            self.places.vacate(place)
        if kept:
            self._return_places()
        return bool(kept)

    def longest_rest(self, rested: Rested) -> int:
        """Steps after which those that rest go on at the latest: when they are overdue, and every
        other that lent the same place and is overdue before has had its turn."""
        groups = self.resting.groups()
        ahead = [r for r in groups if r.place == rested.place and r.since <= rested.since]
        return REST_STEPS + len(ahead) * self._costs.turn_steps

    @property
    def longest_loan(self) -> int:
        """Steps for which a row is lent at the most. It is a stay, and where its adapter lends its
        place meanwhile, as long as that may rest."""
        num_turns = 1 + len(self.resting.by_adapter)
        return STAY_STEPS + REST_STEPS + num_turns * self._costs.turn_steps

    # Visits

    def _end_visits(self, step_id: StepId, put_to_rest: PutToRest) -> None:
        """Visitors whose prompts are computed rest, and those who lent them a place have it back;
        unless there is a place for both, or the visitor has many more rows, or may go on."""
        for place in self.places.visited():
            visitor, lender = place.holder, place.lender
            assert visitor is not None
            assert lender is not None
            if place.kept_steps is not None or self._is_in_prompt(visitor):
                continue
            rested = self.resting.find(lender)
            num_rows = self._adapters.num_seats(visitor)
            is_back = self.places.of(lender) is not None
            if rested is None or is_back or rested.place != place.number:
                place.lender = None  # or it has been back, and rests for another
            elif self._may_go_on(place, num_rows, len(rested.requests), step_id):
                continue
            elif num_rows >= 2 * len(rested.requests) or self._is_place_for_all:
                place.lender = None
            else:
                self._pass_on(place, lender, step_id, put_to_rest)

    def _is_in_prompt(self, adapter: AdapterDigest) -> bool:
        return any(request.group[0] == adapter for request in self.rows.prompts)

    @property
    def _is_place_for_all(self) -> bool:
        return len(self.places.free()) >= len(self.places.away())

    def _may_go_on(
        self, place: AdapterPlace, num_rows: int, num_lenders: int, step_id: StepId
    ) -> bool:
        """Whether a visitor keeps a place behind its prompts, before those whose it is."""
        if not 0 < num_rows < num_lenders:
            return False
        is_spent = self._budget.is_spent
        num_steps = MIN_VISIT_STEPS if is_spent else self._costs.stay_steps
        return step_id - place.since < num_steps

    # Places that are free

    def _fill_free_places(
        self, waiting: WaitingQueue, loaded: Collection[Request], step_id: StepId
    ) -> None:
        """Free places are for those that rest. But if none of them is overdue, one is kept for who
        has waited for longer than they; and where others' requests are so short that their slots
        are used in every step and their places never for long, for who has waited for long."""
        free, away = self.places.free(), self.places.away()
        if not free:
            return
        latest = step_id - STAY_STEPS if len(free) > len(away) else away[0].since
        is_any_overdue = bool(away) and step_id - away[0].since >= REST_STEPS
        older = () if is_any_overdue else self._claims.impatient(waiting, loaded, step_id)
        for request, _ in older:
            adapter = request.group[0]
            assert adapter is not None
            if request.waiting_since < latest and self.resting.find(adapter) is None:
                self.places.keep(free[0], adapter, self._costs.stay_steps)
                break
        self._return_places()

    def _return_places(self) -> None:
        """Those that rest have places that are free, who has rested longest first: the one that
        it lent, or another, if its rows are there."""
        num_free_rows = len(self.rows.free)
        for rested in self.places.away():
            free = sorted(self.places.free(), key=lambda place: place.number != rested.place)
            for place in free:
                if self.places.have_rows(rested, place, num_free_rows):
                    self.places.keep(place, rested.adapter, self._costs.stay_steps)
                    break

    def _free_places(self) -> list[AdapterPlace]:
        """Places that nobody who rests has lent, for those none of whose requests has begun, where
        rows are short: one is lent. None if nobody can lend one."""
        free = self.places.free() if self.keeps_rows else []
        if not free or not self._lacks_row(None) or not self._loans.can_lend:
            return []
        lent = {rested.place for rested in self.places.away()}
        return [place for place in free if place.number not in lent]

    # Rows

    def _lacks_row(self, adapter: AdapterDigest | None) -> bool:
        """Whether no row is free for an adapter. Who has one that is, the policy says."""
        return len(self.rows.free) <= self.num_kept_rows(adapter)

    def _give_rows(
        self,
        waiting: WaitingQueue,
        loaded: Collection[Request],
        step_id: StepId,
        has_room: HasRoom,
        put_to_rest: PutToRest,
    ) -> None:
        """Those whose weights are there and for whom a place is kept have a row, too."""
        for place in self.places.kept():
            adapter = place.holder
            assert adapter is not None
            if place.has_row or place.lender is not None or self.resting.find(adapter) is not None:
                continue
            if not self._costs.is_there(adapter) or not self._lacks_row(adapter):
                continue
            lane = waiting.lanes.get(adapter)
            first = next((r for r in loaded if r.group[0] == adapter), None)
            request = lane.head if first is None and lane is not None else first
            if request in self.resting.loans and self._loans.has_row(adapter):
                continue
            if request is not None and has_room(request):
                self._give_row(place, step_id, put_to_rest)

    def _give_row(self, place: AdapterPlace, step_id: StepId, put_to_rest: PutToRest) -> None:
        if self.keeps_rows:
            self._loans.lend_to(place, step_id, put_to_rest.lend)

    # Places that are taken

    def _place_for(
        self,
        claim: PlaceClaim,
        settled: list[AdapterPlace],
        yielding: list[AdapterPlace],
        step_id: StepId,
    ) -> AdapterPlace | None:
        """Of `settled` places, the one that an adapter can have from its holder: the first of those
        `yielding` to it whose rows are few enough; where those that rest are overdue, at any rate
        the one they lent."""
        rested, num_free_rows = claim.rested, len(self.rows.free)
        most = self._most_rows_for(claim, step_id)
        for place in yielding:
            assert place.holder is not None
            if place.lender is not None or self._adapters.num_seats(place.holder) > most:
                continue
            if rested is None or self.places.have_rows(rested, place, num_free_rows):
                return place
        if rested is None or not claim.is_overdue(step_id):
            return None
        lent = self.places.lent(rested)
        return lent if lent in settled else None

    def _importance(self) -> dict[AdapterDigest | None, int] | None:
        """Of adapters that run, that of their most important request; None where none counts."""
        if not self._by_priority:
            return None
        found: dict[AdapterDigest | None, int] = {}
        for request in self.rows.running:
            adapter, importance = request.group[0], priority_of(request)
            found[adapter] = min(found.get(adapter, importance), importance)
        return found

    def _most_rows_for(self, claim: PlaceClaim, step_id: StepId) -> int:
        """So many rows may rest for a claim: any number while the budget allows it; else no more
        than it brings, and half of those where it has not waited for long."""
        if claim.waiting is None:
            return claim.num_requests if claim.is_overdue(step_id) else claim.num_requests // 2
        if not self._budget.is_spent:
            return self.rows.count
        return claim.num_requests if self._costs.has_spare else 0

    def _is_crowded(self, step_id: StepId) -> bool:
        """Whether as many rest as there are places, and not because nobody's requests end."""
        is_crowded = len(self.places.away()) >= len(self.places)
        return is_crowded and step_id - self._line_moved_at <= AGING_STEPS

    def _can_come(self, claim: PlaceClaim, step_id: StepId, has_room: HasRoom) -> bool:
        """Whether an adapter could run if it had a place; if not, what it lacks is seen to."""
        request = claim.waiting
        if self._costs.has_spare:
            if not self._costs.is_there(claim.adapter):
                self._prefetch.ask_first(claim.adapter)
                if claim.is_overdue(step_id):
                    self._is_slot_owed = not self._prefetch.has_slot
                return False
            if request is not None and self._is_slot_owed:
                return False
        if request is None or has_room(request):
            return True
        self.is_line_held = has_aged(request, step_id)
        return False

    def _swap(
        self, claim: PlaceClaim, place: AdapterPlace, step_id: StepId, put_to_rest: PutToRest
    ) -> None:
        """A holder rests, for who claims its place."""
        holder = place.holder
        assert holder is not None
        num_rows = self._adapters.num_seats(holder)
        num_idle_steps = self._costs.idle_steps(claim.adapter)
        self._budget.spend(num_rows * num_idle_steps)
        self._pass_on(place, claim.adapter, step_id, put_to_rest)
        if num_idle_steps == 0 and (claim.waiting or claim.num_requests < num_rows):
            place.lender = holder

    def _pass_on(
        self, place: AdapterPlace, adapter: AdapterDigest, step_id: StepId, put_to_rest: PutToRest
    ) -> None:
        holder = place.holder
        assert holder is not None
        if self._adapters.num_seats(holder):
            put_to_rest.rest(holder, step_id, place.number)
        self.places.keep(place, adapter, self._costs.stay_steps)
