"""One function per invariant of adapter time slices; each raises AssertionError with the violation.
For tests and the simulator, which call `audit` after every step. Reads everything."""

from __future__ import annotations

from manyroots.scheduler.request import State
from manyroots.scheduler.slices import OVERDUE_STEPS, AdapterSlices, Entry, EntryState


def audit(slices: AdapterSlices) -> None:
    """Every invariant."""
    entries_have_requests(slices)
    states_are_listed(slices)
    running_requests_are_of_running_entries(slices)
    paused_requests_have_pages_and_no_row(slices)
    no_pause_is_longer_than_its_bound(slices)


def entries_have_requests(slices: AdapterSlices) -> None:
    begun = [slices.entry_of(request) for request in slices.rows.running]
    for adapter, entry in slices.entries.items():
        assert entry.adapter == adapter, "an entry is listed under another adapter"
        num_begun = len(entry.paused) + begun.count(entry)
        assert 0 < entry.num_requests >= num_begun, "an entry miscounts its requests"


def states_are_listed(slices: AdapterSlices) -> None:
    """Each entry is in the lists of its state, and few enough may run at once."""
    for adapter, entry in slices.entries.items():
        is_active = entry.state in (EntryState.LOADING, EntryState.RUNNING)
        assert is_active == (adapter in slices.active), f"{entry.state} and in the wrong list"
        is_paused = entry.state is EntryState.PAUSED
        assert is_paused == (entry in slices.paused), f"{entry.state} and in the wrong list"
        assert not is_paused or entry.paused, "an entry is paused and none of its requests is"
    assert slices.entries.keys() >= slices.active.keys(), "an entry without requests may run"
    assert slices.num_blocks == sum(e.num_blocks for e in slices.entries.values())
    is_few = not slices.max_loras or len(slices.active) <= slices.max_loras
    assert is_few, "more adapters may run than --max-loras allows"


def running_requests_are_of_running_entries(slices: AdapterSlices) -> None:
    for request in slices.rows.running:
        state = slices.entry_of(request).state
        assert state is EntryState.RUNNING, f"a request runs whose entry is {state.value}"


def paused_requests_have_pages_and_no_row(slices: AdapterSlices) -> None:
    paused = slices.paused_requests()
    assert len(paused) == slices.num_paused_requests, "paused requests are miscounted"
    for request in paused:
        assert request.state is State.PAUSED, f"listed as paused, and {request.state.value}"
        assert request.row is None, "a paused request has a row"
        assert request.lease is not None, "a paused request has lost its pages"


def longest_pause(slices: AdapterSlices, entry: Entry) -> int:
    """The bound on a pause. A request becomes overdue. Each entry that was overdue before it waits
    for a row, and gets a quantum and two loads; then it gets its own. Each other paused request may
    take a row before it."""
    first = entry.paused_since
    others = (e for e in (*slices.paused, *slices.active.values()) if e.paused and e is not entry)
    num_before = sum(other.paused_since <= first for other in others)
    load_steps = 2 * (slices.adapters.longest_load_steps + 2)
    slice_steps = slices.min_quantum_steps + slices.quantum_steps + load_steps
    num_others = slices.num_paused_requests - len(entry.paused)
    row_steps = slices.min_quantum_steps * num_others
    return OVERDUE_STEPS + (num_before + 1) * slice_steps + row_steps


def no_pause_is_longer_than_its_bound(slices: AdapterSlices) -> None:
    """L07: a stream pauses for at most a stated number of steps, unless others are more
    important."""
    if slices.importance is not None:
        return
    for entry in (slices.base, *slices.active.values(), *slices.paused):
        if entry.paused:
            num_steps, most = slices.step_id - entry.paused_since, longest_pause(slices, entry)
            assert num_steps <= most, f"paused for {num_steps} steps, of {most} at most"
