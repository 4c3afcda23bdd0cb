"""Load or recompute: the measured cost of each (T05).

In: durations of copies and steps, measured by the execute half. Out: whether loading this many
pages is faster than computing their tokens. Has no clock: the same numbers give the same answers.
Units of a family have one size, so time per unit and bytes per second are equivalent.

Before the first measurement, costs come from the settings. The default is zero, so a tier is tried
and measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyroots.cache.policies import LoadCosts
from manyroots.ids import Tier

KEPT = 0.8
"""Weight of earlier measurements when a new one arrives."""
RETRY_AFTER = 256
"""After this many requests avoided a slow tier, it is tried again, because it may have become
faster. The price is one slow hit among this many."""


class Rate:
    """Seconds per item; newer measurements count more."""

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        self._count = KEPT * self._count + count
        self._seconds = KEPT * self._seconds + seconds

    @property
    def seconds_per_one(self) -> float | None:
        return self._seconds / self._count if self._count else None


class Costs:
    """Costs of loading from each tier and of computing."""

    def __init__(self, start: LoadCosts, most_units: Mapping[int, int] | None = None) -> None:
        """`most_units`: by family, the most units that a request of any length needs."""
        self._start = start
        self._most_units = most_units or {}
        self._prefill = Rate()
        self._loads: dict[Tier, dict[int, Rate]] = {Tier.HOST: {}, Tier.STORAGE: {}}
        """By tier and family: one unit, to the next tier up."""
        self._num_declined = {Tier.HOST: 0, Tier.STORAGE: 0}

    def measured_load(self, source: Tier, family: int, num_units: int, seconds: float) -> None:
        """This many units of a family were loaded to the next tier up."""
        if num_units and seconds > 0:
            self._loads[source].setdefault(family, Rate()).add(num_units, seconds)

    def measured_miss(self, source: Tier, family: int, num_units: int, seconds: float) -> None:
        """A tier took this long to report that some of these units are missing. Loading them would
        have taken longer, so this counts only if it is worse than the known rate."""
        rate = self._loads[source].get(family)
        known = None if rate is None else rate.seconds_per_one
        if num_units and seconds / num_units > (known or 0.0):
            self.measured_load(source, family, num_units, seconds)

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed this many tokens, almost all of prompts."""
        if num_tokens and seconds > 0:
            self._prefill.add(num_tokens, seconds)

    def is_worth_loading(self, num_pages: int, num_tokens: int) -> bool:
        """Whether pages on the host arrive sooner than their tokens could be computed."""
        return self.load_s(num_pages) < num_tokens * self._token_s

    def is_worth_fetching(self, num_pages: int, num_tokens: int) -> bool:
        """Like `is_worth_loading`, for pages in storage, which pass through the host."""
        seconds = num_pages * self._page_s(Tier.STORAGE) + self.load_s(num_pages)
        return seconds < num_tokens * self._token_s

    def declined(self, source: Tier) -> None:
        """A request did not use this tier, because it is slow."""
        self._num_declined[source] += 1
        if self._num_declined[source] >= RETRY_AFTER:
            self._num_declined[source] = 0
            self._loads[source].clear()

    def load_s(self, num_pages: int) -> float:
        """Time from the host. For windows and states, counts only the units that the request
        resumes from."""
        seconds = 0.0
        for family, rate in self._loads[Tier.HOST].items():
            num_units = min(num_pages, self._most_units.get(family, num_pages))
            seconds += num_units * (rate.seconds_per_one or 0.0)
        return seconds or num_pages * self._page_s(Tier.HOST)

    def page_s(self, num_tokens: int, *, is_on_host: bool) -> float:
        """To have a page of so many tokens again: from the host if that is quicker."""
        seconds = num_tokens * self._token_s
        return min(seconds, self.load_s(1) or seconds) if is_on_host else seconds

    def _page_s(self, source: Tier) -> float:
        """A page is at most one unit of each family."""
        rates = [rate.seconds_per_one for rate in self._loads[source].values()]
        measured = [seconds for seconds in rates if seconds is not None]
        if measured:
            return sum(measured)
        start = self._start
        return start.seconds_per_page if source is Tier.HOST else start.storage_seconds_per_page

    @property
    def _token_s(self) -> float:
        measured = self._prefill.seconds_per_one
        return self._start.seconds_per_token if measured is None else measured
