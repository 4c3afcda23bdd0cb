"""What a scheduling policy decides: the order of waiting requests, and which request gives way.

Takes requests and their lanes; gives keys, lanes and victims. Knows no row, page or adapter slot.
The scheduler asks a policy through this protocol alone and never by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Protocol

from manyroots.ids import AdapterDigest
from manyroots.scheduler.lanes import Importance, Lane
from manyroots.scheduler.ranking import Ranking
from manyroots.scheduler.request import Request

Lanes = Mapping[AdapterDigest | None, Lane]
Open = Container[AdapterDigest | None]


class SchedulingPolicy(Protocol):
    """One policy, with what it has counted."""

    importance: Importance | None
    """A request gives way to one whose importance is a lower number. None: all are equal."""
    charges_tokens: bool
    """Whether `charge` must be told of each sampled token."""
    patience_steps: int
    """Steps for which a waiting entry displaces no other."""
    row_patience_steps: int
    """Steps for which a waiting entry takes no row of another."""

    # The key by which requests wait

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        """A lane for one adapter's waiting requests, which keeps them in order."""

    def next_lane(self, first: Lane, lanes: Lanes, is_open: Open) -> Lane:
        """The lane that the next request is taken from. `first` has the lowest key."""

    def next_adapters(
        self, first: Callable[[int], list[Lane]], count: int, resident: Sequence[Lane]
    ) -> Iterable[Lane]:
        """At least the `count` lanes whose adapters come next. `first` gives those with the lowest
        keys, `resident` are those whose weights are on the device."""

    def arrive(self, request: Request, order: Ranking[Lane]) -> None:
        """A request is about to wait among the lanes in `order`."""

    # What serving a token charges

    def charge(self, request: Request, num_tokens: int) -> Lane | None:
        """Tokens are computed for a request, or were not after all where the number is negative.
        Gives the lane whose key is lower now, if any."""

    def num_served_tokens(self, request: Request) -> int:
        """What was charged for the request's tenant."""

    def close(self, request: Request) -> None:
        """A request that does not wait is over."""

    # Which running request is the victim

    def victim(
        self, candidates: Sequence[Request], cost: Callable[[Request], tuple[int, int]]
    ) -> Request | None:
        """The request that is preempted where pages are short. `cost`: to resume one."""
