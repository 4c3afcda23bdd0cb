"""One function per invariant of adapter residency; each raises AssertionError saying what is wrong.

For tests and the simulator, which call `audit` after every step. Reads everything, but looks at
thousands of unused slots once.
"""

from __future__ import annotations

from collections import Counter

from manyroots.lora.residency import Residency
from manyroots.lora.slots import Slot


def audit(residency: Residency) -> None:
    """Every invariant."""
    used = used_slots(residency)
    holds_are_counted(residency)
    contents_are_those_of_versions(residency)
    pins_are_counted(residency)
    draining_versions_are_held(residency)
    every_slot_is_in_one_state(residency, used)
    no_adapter_owns_two_slots(residency, used)
    seats_are_the_running_requests(residency, used)
    the_cap_holds(residency)
    blocks_are_those_of_owners(residency, used)
    busy_slots_cool_down(residency, used)
    one_load_is_under_way_per_loading_slot(residency, used)
    one_load_is_under_way_per_arriving_copy(residency)
    owners_of_slots_are_on_the_host(residency)
    host_copies_are_within_the_limit(residency)
    nothing_is_kept_that_nobody_needs(residency)


def used_slots(residency: Residency) -> list[Slot]:
    """Slots that differ in any way from one that was never used, its number of owners aside."""
    return [
        slot
        for slot in residency.slots.all
        if slot.owner is not None
        or slot.is_loading
        or slot.is_leaving
        or slot.num_blocks
        or slot.num_seats
        or slot.busy_until is not None
    ]


def holds_are_counted(residency: Residency) -> None:
    registry = residency.registry
    counted = Counter(hold.version.serial for hold in registry.open_holds)
    assert all(hold.is_open for hold in registry.open_holds), "a released hold is listed as open"
    actual = {serial: count for serial, count in registry.num_holds.items() if count}
    assert actual == dict(counted), f"holds counted {actual}, open {dict(counted)}"
    live = {v.serial for v in registry.loaded.values()} | set(registry.draining)
    assert set(registry.num_holds) == live, "holds are counted of a version that is gone"


def contents_are_those_of_versions(residency: Residency) -> None:
    registry = residency.registry
    loaded = Counter([version.digest for version in registry.loaded.values()])
    draining = Counter([version.digest for version in registry.draining.values()])
    known = loaded.keys() | draining.keys()
    assert registry.contents.keys() == known, "a content without a version"
    for digest, content in registry.contents.items():
        assert content.num_loaded == loaded[digest]
        assert len(content.versions) == loaded[digest] + draining[digest]


def pins_are_counted(residency: Residency) -> None:
    registry = residency.registry
    pinned = Counter(v.digest for v in registry.loaded.values() if v.is_pinned)
    assert registry.pinned == pinned, f"pinned {registry.pinned}, by name {pinned}"


def draining_versions_are_held(residency: Residency) -> None:
    for serial, version in residency.registry.draining.items():
        assert serial == version.serial
        assert residency.registry.num_holds[serial] > 0, f"{version} drains and no request holds it"
        current = residency.registry.loaded.get(version.name)
        assert current is None or current.serial > serial, f"{version} is loaded and draining"


def every_slot_is_in_one_state(residency: Residency, used: list[Slot]) -> None:
    slots = residency.slots
    assert [slot.number for slot in slots.all] == list(range(len(slots.all)))
    assert slots.num_slots is None or len(slots.all) == slots.num_slots
    free = set(slots.free)
    assert len(free) == len(slots.free), "a slot is free twice"
    assert len(free) + len(used) == len(slots.all), "a slot is lost"
    for slot in used:
        assert slot.number not in free, f"slot {slot.number} is free and in use"
        assert slot.owner is not None, f"slot {slot.number} is in use without an owner"
        states = [
            slot.is_loading,
            slot.num_seats > 0,
            slot.number in slots.idle,
            slot.is_leaving,
            slot.num_seats == 0 and slot.busy_until is not None and not slot.is_leaving,
        ]
        assert sum(states) == 1, f"slot {slot.number} is in states {states}"
        assert not (slot.is_leaving and slot.busy_until is None), "leaving and nothing to wait for"


def no_adapter_owns_two_slots(residency: Residency, used: list[Slot]) -> None:
    slots = residency.slots
    owners = [slot.owner for slot in used if not slot.is_leaving]
    assert len(set(owners)) == len(owners), "an adapter owns two slots"
    assert set(owners) == set(slots.by_owner), "slots and their index disagree"
    for digest, slot in slots.by_owner.items():
        assert slot.owner == digest


def seats_are_the_running_requests(residency: Residency, used: list[Slot]) -> None:
    """A seated request's slot is its adapter's, from the moment it sits down until it leaves."""
    seats: Counter[int] = Counter()
    for hold in residency.registry.open_holds:
        if hold.slot is not None:
            assert residency.slots.by_owner[hold.digest].number == hold.slot, "a seat was taken"
            seats[hold.slot] += 1
    counted = {slot.number: slot.num_seats for slot in used if slot.num_seats}
    assert counted == seats, f"seats counted {counted}, taken {dict(seats)}"
    assert residency.slots.num_seated == len(seats)


def the_cap_holds(residency: Residency) -> None:
    cap = residency.limits.max_loras
    assert not cap or residency.slots.num_seated <= cap, "more adapters run than --max-loras"


def blocks_are_those_of_owners(residency: Residency, used: list[Slot]) -> None:
    """None is lost, and none is taken twice."""
    slots, num_blocks = residency.slots, residency.slots.num_blocks
    assert slots.num_free_blocks >= 0, "adapters take more than there is"
    taken = sum(slot.num_blocks for slot in used)
    assert taken + slots.num_free_blocks == num_blocks, f"{taken} blocks taken of {num_blocks}"
    seated = sum(slot.num_blocks for slot in used if slot.num_seats)
    assert seated == slots.num_seated_blocks, "blocks of running requests are miscounted"


def busy_slots_cool_down(residency: Residency, used: list[Slot]) -> None:
    """A request that waits for a step waits for a launched one, and is looked at when it is
    done."""
    slots = residency.slots
    due = [step_id for step_id, _ in slots.cooling]
    assert due == sorted(due)
    for slot in used:
        if slot.busy_until is not None:
            assert slot.busy_until in slots.launched, f"slot {slot.number} waits for a done step"
            assert (slot.busy_until, slot) in slots.cooling


def one_load_is_under_way_per_loading_slot(residency: Residency, used: list[Slot]) -> None:
    loading = {slot.ref: slot.owner for slot in used if slot.is_loading}
    loads = [load for load in residency.transfers.loads.values() if load.target is not None]
    assert len(loads) == len(loading), f"{len(loads)} loads for {len(loading)} loading slots"
    assert {load.target: load.digest for load in loads} == loading


def one_load_is_under_way_per_arriving_copy(residency: Residency) -> None:
    loads = [load.digest for load in residency.transfers.loads.values() if load.target is None]
    assert len(loads) <= 1, "adapters crowd each other on their way to the host"
    assert set(loads) == residency.host.arriving, "loads to the host are not what it expects"
    assert not residency.host.arriving & set(residency.slots.by_owner), "loaded twice at once"


def owners_of_slots_are_on_the_host(residency: Residency) -> None:
    host = residency.host
    assert host.bound == set(residency.slots.by_owner), "bound copies are not the owners of slots"
    assert not host.bound & set(host.loose), "a copy is bound and loose"
    assert not host.arriving & (host.bound | set(host.loose)), "a copy is here and on its way"


def host_copies_are_within_the_limit(residency: Residency) -> None:
    host = residency.host
    assert host.limit is None or len(host) <= host.limit, f"{len(host)} copies, limit {host.limit}"


def nothing_is_kept_that_nobody_needs(residency: Residency) -> None:
    """Weights without a version are gone, but for loads that can't be called back."""
    loading = {load.digest for load in residency.transfers.loads.values()}
    needed = set(residency.registry.contents) | loading
    assert set(residency.slots.by_owner) <= needed, "an unloaded adapter owns a slot"
    assert residency.host.bound | set(residency.host.loose) <= needed, "an unloaded copy is kept"
