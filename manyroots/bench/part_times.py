"""Processor time of a thread, by the part of the program that it was in.

Takes an object's methods and what to call the part that they are; gives the nanoseconds spent in
each, without those of the parts that it called. One thread alone.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import pairwise
from typing import Any

ELSEWHERE = "elsewhere"


class PartTimes:
    """A clock that knows which part runs now."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._parts = [ELSEWHERE]
        self._clock = clock
        self._look_ns = _look_ns(clock)
        self._since = clock()

    def take(self) -> Counter[str]:
        """What was spent since the last call."""
        self._note()
        spent, self.spent_ns = self.spent_ns, Counter()
        return spent

    def watch(self, whose: Any, methods: Iterable[str], part: str) -> None:
        """Count an object's methods as a part from now on."""
        for method in methods:
            setattr(whose, method, self.counted(getattr(whose, method), part))

    def counted(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same, counted as a part."""

        @wraps(call)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._note()
            self._parts.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._note()
                self._parts.pop()

        return counting

    def _note(self) -> None:
        now = self._clock()
        self.spent_ns[self._parts[-1]] += max(0, now - self._since - self._look_ns)
        self._since = now


def _look_ns(clock: Callable[[], int]) -> int:
    """What reading the clock takes, which no part is charged for."""
    looks = [clock() for _ in range(1000)]
    return round(statistics.median(after - before for before, after in pairwise(looks)))
