"""The interface of a scheduling policy: the order of waiting requests, and the preemption victim.

Takes requests and their lanes; gives keys, lanes and victims. Knows no row, page or adapter slot.
The scheduler uses a policy only through this protocol, never by its name.
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
    """One policy, with its counters."""

    importance: Importance | None
    """A request is preempted for one with a lower number. None: all are equal."""
    charges_tokens: bool
    """Whether `charge` must be called for each sampled token."""
    patience_steps: int
    """Steps for which a waiting entry displaces no other."""
    row_patience_steps: int
    """Steps for which a waiting entry takes no row of another."""

    # The key by which requests wait

    def new_lane(self, adapter: AdapterDigest | None) -> Lane:
        """A lane for one adapter's waiting requests, which keeps them in order."""

    def next_lane(self, first: Lane, lanes: Lanes, is_open: Open) -> Lane:
        """The lane from which the next request is taken. `first` has the lowest key."""

    def next_adapters(
        self, first: Callable[[int], list[Lane]], count: int, resident: Sequence[Lane]
    ) -> Iterable[Lane]:
        """At least the `count` lanes whose adapters are next. `first` gives those with the lowest
        keys, `resident` are those whose weights are on the device."""

    def arrive(self, request: Request, order: Ranking[Lane]) -> None:
        """A request is about to wait among the lanes in `order`."""

    # What serving a token charges

    def charge(self, request: Request, num_tokens: int) -> Lane | None:
        """Tokens are computed for a request; a negative number takes earlier ones back. Returns the
        lane whose key is lower now, if any."""

    def num_served_tokens(self, request: Request) -> int:
        """The tokens charged to the request's tenant."""

    def close(self, request: Request) -> None:
        """A request that does not wait is finished."""

    # Which running request is the victim

    def victim(
        self, candidates: Sequence[Request], cost: Callable[[Request], tuple[int, int]]
    ) -> Request | None:
        """The request to preempt when pages are short. `cost`: the cost to resume one."""
