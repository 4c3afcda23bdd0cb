"""One function per invariant of fetches; each raises AssertionError with the violation.

For tests and the simulator, which call `audit` after every step. Reads everything.
"""

from __future__ import annotations

from manyroots.scheduler.fetches import Fetches
from manyroots.scheduler.request import State
from manyroots.scheduler.slices import AdapterSlices
from manyroots.scheduler.slices_audit import audit as audit_slices


def audit(slices: AdapterSlices, fetches: Fetches) -> None:
    """Every invariant of the scheduler, including those of adapter time slices."""
    keeps_end_at_the_start(fetches)
    keeps_have_requests(fetches)
    who_waits_for_storage_is_asked_for_or_in_line(fetches)
    audit_slices(slices)


def keeps_end_at_the_start(fetches: Fetches) -> None:
    """T04: pages that arrived for a request are kept until it starts or ends, and no longer."""
    for request in fetches.kept:
        is_waiting = request.state in (State.FETCHING, State.WAITING, State.LOADING)
        assert is_waiting, f"something is kept for one that is {request.state.value}"


def keeps_have_requests(fetches: Fetches) -> None:
    """T04: every keep belongs to a request that will release it."""
    num_keeps = len(fetches.kept) + sum(t.kept is not None for t in fetches.asked.values())
    assert num_keeps == fetches.num_open_keeps, "a keep belongs to no request"


def who_waits_for_storage_is_asked_for_or_in_line(fetches: Fetches) -> None:
    for request in fetches.fetching:
        assert request.state is State.FETCHING, "one waits for storage and is elsewhere"
        is_known = request in fetches.asked or request in fetches.in_line
        assert is_known, "a request waits for storage that will never be asked"
    for request in fetches.asked:
        is_waiting = request.state in (State.FETCHING, State.WAITING, State.LOADING)
        assert is_waiting, f"storage is to answer for one that is {request.state.value}"
    for request in fetches.in_line:
        is_waiting = request.state in (State.FETCHING, State.WAITING)
        assert is_waiting, f"storage is to be asked for one that is {request.state.value}"
    assert fetches.in_line.isdisjoint(fetches.asked), "one is asked for and in line"
    assert fetches.in_line.isdisjoint(fetches.kept), "one in line keeps something"
