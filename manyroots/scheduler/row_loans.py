"""Rows that are lent: who rests so that an adapter with a place has a row to begin in.

Where places are free and rows are not, nobody's place is taken: one request of whoever has the most
rows rests, for the first of an adapter that has none. The next row that is free is its own again;
if none is within STAY_STEPS another of its adapter rests in its stead, so that no stream pauses for
long. No row stands idle for it.

Knows rows and who runs in them; not whose turn it is (`turns.py`), nor who rests as an adapter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from manyroots.ids import AdapterDigest, StepId
from manyroots.scheduler.places import AdapterPlace, AdapterPlaces
from manyroots.scheduler.request import Request
from manyroots.scheduler.resting import Resting
from manyroots.scheduler.rows import Rows
from manyroots.scheduler.swap_costs import STAY_STEPS

Lend = Callable[[Request, StepId], None]
"""Puts one request to rest: since when."""
IsOpen = Callable[[AdapterDigest | None], bool]
"""Whether requests of an adapter may be seated now."""


class RowLoans:
    """Chooses who lends a row, and for how long."""

    def __init__(self, resting: Resting, rows: Rows, places: AdapterPlaces) -> None:
        self._resting = resting
        self._rows = rows
        self._places = places

    def num_in_line(self, is_open: IsOpen) -> int:
        """Requests that have lent a row and would go on if one were free."""
        return sum(is_open(request.group[0]) for request in self._resting.loans)

    def has_row(self, adapter: AdapterDigest | None) -> bool:
        """Whether one that has lent its row could go on, as far as rows are concerned."""
        return len(self._rows.free) > self._places.num_rows_of_others(adapter)

    def keep_places(self, num_steps: int) -> None:
        """An adapter whose last running request has ended keeps its place for those that have lent
        their rows: the one that was freed is theirs."""
        for adapter in dict.fromkeys(request.group[0] for request in self._resting.loans):
            place = None if adapter is None else self._places.last_of(adapter)
            if adapter is None or place is None or place.ran_at is None:
                continue
            if self._places.is_free(place) and self._resting.find(adapter) is None:
                self._places.keep(place, adapter, num_steps)

    def hand_on(self, step_id: StepId, num_steps: int, is_open: IsOpen, lend: Lend) -> None:
        """Who has lent its row for long has another: one of its own adapter's, if any runs. Where
        all of those rest for it, their place is kept till it runs."""
        num_given = 0
        for request, since in list(self._resting.loans.items()):
            if step_id - since < STAY_STEPS:
                return
            adapter = request.group[0]
            if not is_open(adapter):
                continue
            if len(self._rows.free) - num_given <= self._places.num_rows_of_others(adapter):
                lender = self._first_of(adapter) or self._lender()
                if lender is None:
                    continue
                place = None if adapter is None else self._places.of(adapter)
                lend(lender, step_id)
                if place is not None:
                    self._places.hold(place, num_steps)
            num_given += 1

    @property
    def can_lend(self) -> bool:
        """Whether anybody has a row to lend: more than one, that is."""
        return self._lender() is not None

    def lend_to(self, place: AdapterPlace, step_id: StepId, lend: Lend) -> None:
        """A row for the first request of an adapter that has a place, which others leave to it; if
        anybody can lend one."""
        lender = self._lender() if len(self._resting.loans) < len(self._places) else None
        if lender is not None:
            lend(lender, step_id)
            self._places.reserve_row(place)

    def _lender(self) -> Request | None:
        """Of whoever has the most rows, and more than one, the request that has run for longest.
        When it is back it is the last to be asked."""
        num_rows = Counter(request.group[0] for request in self._rows.running)
        for adapter, count in num_rows.most_common():
            if count == 1:
                break
            if adapter is None or self._places.may_lend_row(adapter):
                first = self._first_of(adapter)
                if first is not None:
                    return first
        return None

    def _first_of(self, adapter: AdapterDigest | None) -> Request | None:
        """Not one whose prompt is not computed yet: it would lie half done."""
        running, prompts = self._rows.running, self._rows.prompts
        return next((r for r in running if r.group[0] == adapter and r not in prompts), None)
