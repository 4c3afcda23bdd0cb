"""Load or recompute: what each takes, as measured so far (T05).

In: how long copies and steps took, as numbers that the execute half measured. Out: whether loading
so many pages is quicker than computing their tokens. Knows no clock: the same numbers give the same
answers. Units of a family have one size, so that time per unit and bytes per second are one thing.

What was never measured costs what the settings say, by default nothing: it is tried, and measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from manyroots.cache.policies import LoadCosts
from manyroots.ids import Tier

KEPT = 0.8
"""How much earlier measurements count when a new one comes."""
RETRY_AFTER = 256
"""So many requests that left a slow tier alone: then it is tried again, as it may have become
quick. The price is one slow hit among so many."""


class Rate:
    """Seconds for one of something; newer measurements count more."""

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
    """What loading from each tier and computing take."""

    def __init__(self, start: LoadCosts, most_units: Mapping[int, int] | None = None) -> None:
        """`most_units`: by family of which a request needs no more, however long it is."""
        self._start = start
        self._most_units = most_units or {}
        self._prefill = Rate()
        self._loads: dict[Tier, dict[int, Rate]] = {Tier.HOST: {}, Tier.STORAGE: {}}
        """By tier and family: one unit, to the tier above."""
        self._num_declined = {Tier.HOST: 0, Tier.STORAGE: 0}

    def measured_load(self, source: Tier, family: int, num_units: int, seconds: float) -> None:
        """So many units of a family came from a tier to the one above it."""
        if num_units and seconds > 0:
            self._loads[source].setdefault(family, Rate()).add(num_units, seconds)

    def measured_miss(self, source: Tier, family: int, num_units: int, seconds: float) -> None:
        """A tier took so long to say that it does not have all of these units. To bring them would
        have taken longer: this counts only where it is worse than what is known."""
        rate = self._loads[source].get(family)
        known = None if rate is None else rate.seconds_per_one
        if num_units and seconds / num_units > (known or 0.0):
            self.measured_load(source, family, num_units, seconds)

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens, nearly all of prompts."""
        if num_tokens and seconds > 0:
            self._prefill.add(num_tokens, seconds)

    def is_worth_loading(self, num_pages: int, num_tokens: int) -> bool:
        """Whether pages on the host are there sooner than their tokens would be computed."""
        return self.load_s(num_pages) < num_tokens * self._token_s

    def is_worth_fetching(self, num_pages: int, num_tokens: int) -> bool:
        """As `is_worth_loading`, for pages in storage, which come by way of the host."""
        seconds = num_pages * self._page_s(Tier.STORAGE) + self.load_s(num_pages)
        return seconds < num_tokens * self._token_s

    def declined(self, source: Tier) -> None:
        """A request has left this tier alone, because it is slow."""
        self._num_declined[source] += 1
        if self._num_declined[source] >= RETRY_AFTER:
            self._num_declined[source] = 0
            self._loads[source].clear()

    def load_s(self, num_pages: int) -> float:
        """From the host: of a window's or a state's units only what the request goes on from."""
        seconds = 0.0
        for family, rate in self._loads[Tier.HOST].items():
            num_units = min(num_pages, self._most_units.get(family, num_pages))
            seconds += num_units * (rate.seconds_per_one or 0.0)
        return seconds or num_pages * self._page_s(Tier.HOST)

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
