"""The audit that other tests run after every step notices slots that are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manyroots.lora.audit import audit
from manyroots.lora.slots import DeviceSlots
from tests.unit.lora.adapters import Adapters, content

NUM_SLOTS = 5

WRONG: dict[str, tuple[Callable[[DeviceSlots], None], str]] = {
    "lost": (lambda slots: slots.free.remove(slots.free[0]), "lost"),
    "free twice": (lambda slots: slots.free.append(slots.free[0]), "free twice"),
    "free and owned": (
        lambda slots: slots.free.__setitem__(0, slots.by_owner[content("a")].number),
        "free and in use",
    ),
    "used without an owner": (lambda slots: _spare(slots, "num_blocks"), "lost"),
    "loading and idle": (lambda slots: _set(slots, "a", "is_loading", True), "in states"),
    "owned by an adapter that is unloaded": (
        lambda slots: _set(slots, "a", "owner", content("c")),
        "disagree",
    ),
    "one seat too many": (lambda slots: _set(slots, "b", "num_seats", 2), "seats counted"),
    "without the seat that is taken": (lambda slots: _leave(slots, "b"), "seats counted"),
    "with a block too many": (lambda slots: _set(slots, "a", "num_blocks", 1), "blocks taken"),
    "waiting for a step that is done": (
        lambda slots: _set(slots, "b", "busy_until", 7),
        "waits for a done step",
    ),
}


def _set(slots: DeviceSlots, text: str, name: str, value: object) -> None:
    setattr(slots.by_owner[content(text)], name, value)


def _spare(slots: DeviceSlots, name: str) -> None:
    setattr(slots.all[slots.free[0]], name, 1)


def _leave(slots: DeviceSlots, text: str) -> None:
    slot = slots.by_owner[content(text)]
    slot.num_seats = 0
    slots.idle[slot.number] = slot


def some_slots_in_use() -> Adapters:
    """One idle, one seated, the others free."""
    adapters = Adapters(NUM_SLOTS)
    for name in "ab":
        adapters.register(name)
    adapters.bring("a", "b")
    adapters.seat(adapters.acquire("b"))
    return adapters


def test_slots_in_order_pass() -> None:
    audit(some_slots_in_use().residency)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_slot_that_is_wrong_is_noticed(wrong: str) -> None:
    adapters = some_slots_in_use()
    spoil, message = WRONG[wrong]
    spoil(adapters.residency.slots)
    with pytest.raises(AssertionError, match=message):
        audit(adapters.residency)
