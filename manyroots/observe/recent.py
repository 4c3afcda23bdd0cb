"""What the page shows of the last requests: times, and how much of prompts was reused.

Takes times as they happen; gives percentiles when asked. Fixed in size.
"""

from __future__ import annotations

from array import array

from manyroots.ids import AdapterName


class RecentTimes:
    """The newest so many times, in seconds."""

    def __init__(self, size: int) -> None:
        self._times = array("d", bytes(8 * size))
        self._count = 0

    def add(self, seconds: float) -> None:
        self._times[self._count % len(self._times)] = seconds
        self._count += 1

    def percentiles(self, *shares: float) -> list[float]:
        """By nearest rank, in seconds; 0 where there is nothing yet."""
        known = sorted(self._times[: self._count])
        if not known:
            return [0.0] * len(shares)
        return [known[min(len(known) - 1, int(share * len(known)))] for share in shares]


class ReuseByAdapter:
    """Requests that gave a token, their prompt tokens, and how many of those were found."""

    def __init__(self) -> None:
        self._counts: dict[AdapterName | None, tuple[int, int, int]] = {}

    def count(self, adapter: AdapterName | None, num_prompt: int, num_cached: int) -> None:
        requests, prompt, cached = self._counts.get(adapter, (0, 0, 0))
        self._counts[adapter] = requests + 1, prompt + num_prompt, cached + num_cached

    def of(self, adapter: AdapterName | None) -> tuple[int, int, int]:
        return self._counts.get(adapter, (0, 0, 0))

    def forget(self, adapter: str) -> None:
        """Its name means nothing any more."""
        self._counts.pop(AdapterName(adapter), None)
