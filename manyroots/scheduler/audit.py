"""One function per invariant of places, turns and fetches; each raises AssertionError saying what
is wrong.

For tests and the simulator, which call `audit` after every step. Reads everything.
"""

from __future__ import annotations

from manyroots.scheduler.fetches import Fetches
from manyroots.scheduler.request import State
from manyroots.scheduler.turns import AdapterTurns


def audit(turns: AdapterTurns, fetches: Fetches) -> None:
    """Every invariant."""
    who_keeps_has_not_begun(fetches)
    keeps_are_somebodys(fetches)
    who_waits_for_storage_is_asked_for_or_in_line(fetches)
    if len(turns.places):
        who_runs_has_a_place(turns)
        nobody_has_two_places(turns)
        places_are_kept_for_those_that_do_not_run(turns)
        who_rests_lent_a_place(turns)
        who_rests_has_its_rows(turns)
        nobody_rests_for_too_long(turns)
        who_lent_a_row_rests_alone(turns)
        nobody_lends_a_row_for_too_long(turns)


def who_runs_has_a_place(turns: AdapterTurns) -> None:
    places = turns.places
    for request in turns.rows.running:
        adapter = request.group[0]
        assert adapter is None or places.of(adapter) is not None, "an adapter runs without a place"


def nobody_has_two_places(turns: AdapterTurns) -> None:
    holders = [p.holder for p in turns.places.all if p.holder is not None]
    assert len(set(holders)) == len(holders), "an adapter holds two places"
    for place in turns.places.all:
        is_listed = place.holder is None or turns.places.last_of(place.holder) is place
        assert is_listed, f"place {place.number} and its holder disagree"


def places_are_kept_for_those_that_do_not_run(turns: AdapterTurns) -> None:
    running = {request.group[0] for request in turns.rows.running}
    for place in turns.places.kept():
        assert place.holder is not None, f"place {place.number} is kept for nobody"
        assert place.holder not in running, f"place {place.number} is kept for one that runs"


def who_rests_lent_a_place(turns: AdapterTurns) -> None:
    places = turns.places
    for rested in turns.resting.groups():
        assert rested.requests, "an adapter rests without requests"
        place = places.of(rested.adapter)
        assert place is None or place is places.lent(rested), "one is back in another's place"


def who_rests_has_its_rows(turns: AdapterTurns) -> None:
    """Where importance counts none are kept: whoever rests may be less important."""
    if turns.keeps_rows:
        num_free, num_kept = len(turns.rows.free), turns.places.num_kept_rows()
        assert num_free >= num_kept, f"{num_kept} rows are kept for those that rest, of {num_free}"


def nobody_rests_for_too_long(turns: AdapterTurns) -> None:
    """A stream pauses for a stated number of steps at most, but where others are more important:
    their requests may have its rows."""
    if not turns.keeps_rows:
        return
    for rested in turns.resting.groups():
        num_steps, most = turns.step_id - rested.since, turns.longest_rest(rested)
        assert num_steps <= most, f"some rest for {num_steps} steps, of {most} at most"


def who_keeps_has_not_begun(fetches: Fetches) -> None:
    """T04: what came for a request is kept until it begins or is over, and no longer."""
    for request in fetches.kept:
        is_waiting = request.state in (State.FETCHING, State.WAITING, State.LOADING)
        assert is_waiting, f"something is kept for one that is {request.state.value}"


def keeps_are_somebodys(fetches: Fetches) -> None:
    """T04: nothing is kept that nobody will let go of."""
    num_keeps = len(fetches.kept) + sum(t.kept is not None for t in fetches.asked.values())
    assert num_keeps == fetches.num_open_keeps, "something is kept for nobody"


def who_waits_for_storage_is_asked_for_or_in_line(fetches: Fetches) -> None:
    for request in fetches.fetching:
        assert request.state is State.FETCHING, "one waits for storage and is elsewhere"
        is_known = request in fetches.asked or request in fetches.in_line
        assert is_known, "one waits for storage that nobody will ask"
    for request in fetches.asked:
        is_waiting = request.state in (State.FETCHING, State.WAITING, State.LOADING)
        assert is_waiting, f"storage is to answer for one that is {request.state.value}"
    for request in fetches.in_line:
        is_waiting = request.state in (State.FETCHING, State.WAITING)
        assert is_waiting, f"storage is to be asked for one that is {request.state.value}"
    assert fetches.in_line.isdisjoint(fetches.asked), "one is asked for and in line"
    assert fetches.in_line.isdisjoint(fetches.kept), "one in line keeps something"


def who_lent_a_row_rests_alone(turns: AdapterTurns) -> None:
    """Rows are lent to those who come into a place: never more than there are places, but for
    those that are free again."""
    loans, num_free = turns.resting.loans, len(turns.rows.free)
    assert len(loans) - num_free <= len(turns.places), f"{len(loans)} rows are lent"
    num_reserved = sum(place.has_row for place in turns.places.all)
    assert num_reserved == turns.places.num_reserved_rows, "rows are reserved for nobody"
    for request in loans:
        assert request.state is State.RESTING, "one has lent its row and does not rest"
        assert request.row is None, "one has lent its row and has it"
        rested = None if request.group[0] is None else turns.resting.find(request.group[0])
        assert rested is None or request not in rested.requests, "one rests twice"


def nobody_lends_a_row_for_too_long(turns: AdapterTurns) -> None:
    """Be it alone, or since its adapter has lent its place beside."""
    resting, most = turns.resting, turns.longest_loan
    lent = list(resting.loans.values())
    for rested in resting.groups():
        lent += [since for since in rested.requests.values() if since < rested.since]
    for since in lent:
        num_steps = turns.step_id - since
        assert num_steps <= most, f"a row is lent for {num_steps} steps, of {most} at most"
