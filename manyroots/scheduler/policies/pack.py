"""Grouped by adapter: an adapter's waiting requests are taken together, in order of arrival.

Fewer adapters thus run at once, and weights are loaded less often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import Lane, PlainLane
from manyroots.scheduler.policies.fcfs import FcfsPolicy
from manyroots.scheduler.policies.protocol import Lanes, Open
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request

PATIENCE_STEPS = 256
"""An entry that has waited for less displaces no other: waiting requests of running adapters may be
grouped first."""
ROW_PATIENCE_STEPS = 512
"""An entry that has waited for less takes no other's row: the length of an answer. An entry that
started sooner would run beside the others for as long."""
CHOICE = 4
"""The adapter with the most requests is loaded next, among this many times those that fit, oldest
first. One load then serves as many requests as possible."""


def _begun_first(request: Request) -> int:
    """A preempted request resumes before any other starts."""
    return 0 if request.num_cached_tokens is None else -1


class PackPolicy(FcfsPolicy):
    """One group at a time: the requests that wait for an adapter when it is chosen. A later request
    joins its next group, so the oldest request's adapter is always served in the end."""

    patience_steps = PATIENCE_STEPS
    row_patience_steps = ROW_PATIENCE_STEPS

    def __init__(self) -> None:
        self._group: AdapterDigest | None = None
        self._group_end = self._newest = 0
        """The last request of that group, and the last that has arrived, by their serials."""

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        return PlainLane(adapter, _begun_first)

    def arrive(self, request: Request, order: Ranking[Lane]) -> None:
        self._newest = max(self._newest, request.serial)

    def next_lane(self, first: Lane, lanes: Lanes, is_open: Open) -> Lane:
        if _begun_first(first.head) < 0:
            return first
        lane = lanes.get(self._group) if self._group in is_open else None
        if lane is not None and lane.head.serial <= self._group_end:
            return lane
        self._group, self._group_end = first.adapter, self._newest
        return first

    def next_adapters(
        self, first: Callable[[int], list[Lane]], count: int, resident: Sequence[Lane]
    ) -> Iterable[Lane]:
        longest = sorted(first(CHOICE * count), key=len, reverse=True)
        return dict.fromkeys([*resident, *longest])
