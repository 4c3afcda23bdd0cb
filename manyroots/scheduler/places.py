"""Places: which adapter has which one, and who has lent it.

At most `--max-loras` adapters run at once, each in a *place*. An adapter holds a place while its
requests run, or while it is kept for them because their weights are on their way. Requests that
rest (`resting.py`) have lent theirs: it goes round among its holder and those who lent it. Rows go
with places: as many are kept free in each as the largest of those who lent it needs beyond what the
holder uses, so that whoever has its place back has its rows, too.

Knows who holds, who rests and how many rows that takes; not who should come next (`turns.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from manyroots.ids import AdapterDigest, StepId
from manyroots.lora.residency import Residency
from manyroots.scheduler.resting import Rested, Resting

GAP_STEPS = 4
"""An adapter none of whose requests runs for so few steps has kept its place: with short outputs
all may end at once, and the next begin."""


class AdapterPlace:
    """One of those. Only `AdapterPlaces` changes it."""

    __slots__ = ("has_row", "holder", "kept_steps", "lender", "number", "ran_at", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.holder: AdapterDigest | None = None
        """Who runs in it, or is about to; if neither, who did last."""
        self.since = StepId(0)
        """When the holder's requests began to run in it."""
        self.ran_at: StepId | None = None
        """The last step in which they did, as far as anybody looked."""
        self.kept_steps: int | None = None
        """For so many more steps it is kept for its holder, once the weights are there. None: the
        holder has begun."""
        self.lender: AdapterDigest | None = None
        """Who has it back when the holder's prompts are computed: the holder is a *visitor*."""
        self.has_row = False
        """Whether a row is reserved for its holder, till it begins."""


class AdapterPlaces:
    """All places. With none, adapters need none: as many run as are asked for."""

    def __init__(self, count: int, adapters: Residency, resting: Resting) -> None:
        self._slot_of = adapters.slots.by_owner.get
        self._resting = resting
        self.all = [AdapterPlace(number) for number in range(count)]
        self._by_holder: dict[AdapterDigest, AdapterPlace] = {}
        self.num_reserved_rows = 0

    def __len__(self) -> int:
        return len(self.all)

    # Who holds which

    def of(self, adapter: AdapterDigest) -> AdapterPlace | None:
        """The place that an adapter has, whether it runs already or not."""
        place = self._by_holder.get(adapter)
        return None if place is None or self.is_free(place) else place

    def last_of(self, adapter: AdapterDigest) -> AdapterPlace | None:
        """The place that an adapter has or had last, if nobody else has got it since."""
        return self._by_holder.get(adapter)

    def is_free(self, place: AdapterPlace) -> bool:
        return place.kept_steps is None and self._num_used(place) == 0

    def free(self) -> list[AdapterPlace]:
        used = self._num_used
        return [place for place in self.all if place.kept_steps is None and not used(place)]

    def kept(self) -> list[AdapterPlace]:
        """Those whose holders do not run yet."""
        return [place for place in self.all if place.kept_steps is not None]

    def visited(self) -> list[AdapterPlace]:
        return [place for place in self.all if place.lender is not None]

    def settled(self, step_id: StepId, stay_steps: int) -> list[AdapterPlace]:
        """Those that their holders have had for so long: with the fewest rows first, of those
        whichever was had for longest."""
        settled = [
            (num_used, place.since, place.number)
            for place in self.all
            if place.kept_steps is None
            and step_id - place.since >= stay_steps
            and (num_used := self._num_used(place))
        ]
        return [self.all[number] for _, _, number in sorted(settled)]

    # Who lent which

    def away(self) -> list[Rested]:
        """Those that rest and have no place; who has rested longest comes first."""
        return [rested for rested in self._resting.groups() if self.of(rested.adapter) is None]

    def lent(self, rested: Rested) -> AdapterPlace:
        """The place that those who rest have lent."""
        return self.all[rested.place]

    # Changes

    def note_running(self, step_id: StepId) -> None:
        """The places whose holders run in this step."""
        for place in self.all:
            if self._num_used(place):
                place.ran_at = step_id

    def keep(self, place: AdapterPlace, adapter: AdapterDigest, num_steps: int) -> None:
        """A place is kept for an adapter; whoever ran in it rests or has ended."""
        if place.holder != adapter:
            self._hand_over(place, adapter)
        self._free_row(place)
        place.ran_at = None  # when it is back it has come
        place.kept_steps = num_steps

    def hold(self, place: AdapterPlace, num_steps: int) -> None:
        """The holder's last row changes hands: its place is its own meanwhile, and its stay goes
        on."""
        if self.is_free(place):
            place.kept_steps = num_steps

    def vacate(self, place: AdapterPlace) -> None:
        """A place is kept no more for whom it was."""
        self._free_row(place)
        place.kept_steps = place.lender = None

    def begin(self, adapter: AdapterDigest, step_id: StepId) -> bool:
        """A request of an adapter is about to run: in the place that it has, or in a free one.
        Whether it is the first to run there."""
        place = self.of(adapter)
        if place is None:
            place = self._by_holder.get(adapter) or min(self.free(), key=_last_used)
            if place.holder != adapter:
                self._hand_over(place, adapter)
        elif place.kept_steps is None:
            return False
        self._free_row(place)
        place.kept_steps = None
        if place.ran_at is None or step_id - place.ran_at > GAP_STEPS:
            place.since = step_id
        return True

    def _hand_over(self, place: AdapterPlace, adapter: AdapterDigest) -> None:
        earlier = self._by_holder.pop(adapter, None)
        if earlier is not None:
            earlier.holder = earlier.ran_at = None
            self.vacate(earlier)
        if place.holder is not None:
            del self._by_holder[place.holder]
        place.holder = adapter
        place.ran_at = place.lender = None
        self._by_holder[adapter] = place
        rested = self._resting.find(adapter)
        if rested is not None:
            rested.place = place.number

    # Rows

    def reserve_row(self, place: AdapterPlace) -> None:
        """A row that is free is for whom a place is kept."""
        if not place.has_row:
            place.has_row = True
            self.num_reserved_rows += 1

    def _free_row(self, place: AdapterPlace) -> None:
        if place.has_row:
            place.has_row = False
            self.num_reserved_rows -= 1

    def may_lend_row(self, adapter: AdapterDigest) -> bool:
        """Whether one row less in an adapter's place would leave enough for each who lent it."""
        place = self.of(adapter)
        if place is None:
            return False
        num_used = self._num_used(place)
        return all(
            len(rested.requests) < num_used
            for rested in self._resting.groups()
            if rested.place == place.number and rested.adapter != adapter
        )

    def num_kept_rows(self) -> int:
        """Rows that stand free because those that rest will need them, or who is about to come."""
        return sum(self._kept_rows(self._resting.groups()))

    def num_idle_rows(self) -> int:
        """Rows that would run if nobody rested; less those that run because others do."""
        most: dict[int, int] = {}
        for rested in self.away():
            most[rested.place] = max(most.get(rested.place, 0), len(rested.requests))
        return sum(num_rows - self._num_used(self.all[n]) for n, num_rows in most.items())

    def _num_used(self, place: AdapterPlace) -> int:
        holder = place.holder
        slot = None if holder is None else self._slot_of(holder)
        return 0 if slot is None else slot.num_seats

    def num_rows_of_others(self, adapter: AdapterDigest | None) -> int:
        """Of those, what a new request of an adapter must leave: all but its own place's, and there
        those of its own that rest."""
        place = None if adapter is None else self.of(adapter)
        if not self._resting.by_adapter:  # asked for each request that begins
            return self.num_reserved_rows - (place is not None and place.has_row)
        kept = self._kept_rows(self._resting.groups())
        if place is None or adapter is None:
            return sum(kept)
        returning = self._resting.find(adapter)
        num_returning = 0 if returning is None else len(returning.requests)
        return sum(kept) - kept[place.number] + num_returning

    def have_rows(self, rested: Rested, place: AdapterPlace, num_free_rows: int) -> bool:
        """Whether those that rest would have their rows in a place, if its holder rested, and all
        others who lent theirs would have theirs. Where they lent it, they always do."""
        if rested.place == place.number:
            return True
        num_freed = self._num_used(place)
        others = [other for other in self._resting.groups() if other is not rested]
        kept = self._kept_rows(others)
        num_lent = max((len(o.requests) for o in others if o.place == place.number), default=0)
        kept[place.number] = max(len(rested.requests), num_lent, num_freed)
        return num_free_rows + num_freed >= sum(kept)

    def _kept_rows(self, resting: Iterable[Rested]) -> list[int]:
        """By place, if those rest."""
        used = [self._num_used(place) for place in self.all]
        wanted = list(used)
        for rested in resting:
            number, num_rows = rested.place, len(rested.requests)
            if self.of(rested.adapter) is not None:
                num_rows += used[number]  # they come back to those that are
            wanted[number] = max(wanted[number], num_rows)
        for place in self.all if self.num_reserved_rows else ():
            wanted[place.number] = max(wanted[place.number], int(place.has_row))
        return [most - now for most, now in zip(wanted, used, strict=True)]


def _last_used(place: AdapterPlace) -> tuple[int, int]:
    return -1 if place.ran_at is None else place.ran_at, place.number
