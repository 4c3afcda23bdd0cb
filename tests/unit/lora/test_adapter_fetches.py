"""An adapter that must wait for a slot is brought as far as host memory meanwhile."""

from __future__ import annotations

import pytest

from manyroots.ids import AdapterName, Tier
from manyroots.lora.spec import AdapterSpec
from tests.unit.lora.adapters import Adapters, content, named


def full(max_loras: int = 1, max_cpu_loras: int = 0, names: str = "abcd") -> Adapters:
    """All slots taken by running requests of the first adapters."""
    adapters = Adapters(max_loras, max_cpu_loras)
    for name in names:
        adapters.register(name)
    for name in names[:max_loras]:
        adapters.begin(name)
    return adapters


def test_w20_what_waits_for_a_slot_is_fetched_to_the_host() -> None:
    adapters = full()
    holder = next(iter(adapters.residency.registry.open_holds))
    assert adapters.prepare("b") == ["b"]
    assert adapters.flush() == ([], [])
    assert [load.source for load in adapters.fetches] == [Tier.STORAGE]
    assert adapters.residency.stats().num_loading == 1
    assert adapters.end_fetches() == ["b"]
    assert adapters.on_host() == {"a", "b"}
    adapters.end(holder)
    adapters.prepare("b")
    (load,), _ = adapters.flush()
    assert load.source is Tier.HOST


def test_one_is_fetched_at_a_time_and_none_twice() -> None:
    adapters = full(max_loras=2)
    for _ in range(3):
        adapters.prepare("c", "d")
        adapters.flush()
    assert [load.digest for load in adapters.fetches] == [content("c")]
    adapters.end_fetches()
    adapters.prepare("c", "d")
    adapters.flush()
    assert adapters.end_fetches() == ["d"]
    adapters.prepare("c", "d")
    adapters.flush()
    assert adapters.fetches == [], "both are there"


def test_a_slot_that_becomes_free_is_kept_for_the_one_that_is_arriving() -> None:
    """Else the next in line would take it, and the first wait for another."""
    adapters = full(max_loras=2)
    first = next(iter(adapters.residency.registry.open_holds))
    adapters.prepare("c", "d")
    adapters.flush()
    adapters.end(first)
    assert adapters.prepare("c", "d") == ["c", "d"]
    assert adapters.flush()[0] == []
    assert adapters.end_fetches() == ["c"]
    adapters.prepare("c", "d")
    assert [load.digest for load in adapters.flush()[0]] == [content("c")]


def test_a_fetch_takes_no_room_from_others_that_wait() -> None:
    adapters = full(max_loras=2, max_cpu_loras=3)
    adapters.prepare("c", "d")
    adapters.flush()
    adapters.end_fetches()
    adapters.prepare("c", "d")
    assert adapters.flush() == ([], []), "d would push out c, which comes first"
    assert adapters.fetches == []
    adapters.prepare("d")
    assert [drop.digest for drop in adapters.flush()[1]] == [content("c")]
    assert adapters.end_fetches() == ["d"]


def test_with_no_room_on_the_host_nothing_is_fetched() -> None:
    adapters = full(max_loras=2, max_cpu_loras=2)
    adapters.prepare("c", "d")
    assert adapters.flush() == ([], [])
    assert adapters.fetches == []


@pytest.mark.parametrize("error", [None, "bad file"])
def test_an_adapter_unloaded_while_it_is_fetched_is_dropped_at_the_answer(
    error: str | None,
) -> None:
    adapters = full()
    adapters.prepare("b")
    adapters.flush()
    adapters.unload("b")
    adapters.end_fetches(error)
    assert adapters.on_host() == {"a"}
    assert [drop.digest for drop in adapters.flush()[1]] == [content("b")]


def test_a_failed_fetch_fails_its_own_requests_and_can_be_tried_again() -> None:
    adapters = full()
    adapters.prepare("b")
    adapters.flush()
    (fetch,) = adapters.fetches
    adapters.fetches.clear()
    outcome = adapters.answer(fetch, "bad file")
    assert (outcome.digest, outcome.error) == (content("b"), "bad file")
    assert adapters.on_host() == {"a"}
    adapters.prepare("b")
    adapters.flush()
    assert adapters.end_fetches() == ["b"]


def test_w20_what_was_read_to_open_an_adapter_stays_on_the_host() -> None:
    """Any number of them: two that are opened at once as well."""
    adapters = Adapters(max_loras=1)
    for name in "abc":
        adapters.register(name)
        assert adapters.residency.take_copy(content(name))
        assert not adapters.residency.take_copy(content(name)), "there is one already"
    assert adapters.on_host() == {"a", "b", "c"}
    adapters.prepare("b")
    (load,), _ = adapters.flush()
    assert load.source is Tier.HOST
    assert not adapters.residency.take_copy(content("nobody's"))


def test_a_copy_that_was_just_read_takes_the_place_of_the_longest_unused() -> None:
    adapters = Adapters(max_loras=2, max_cpu_loras=2)
    for name in "abcd":
        adapters.register(name)
    adapters.bring("a", "b")
    assert adapters.residency.take_copy(content("c"))
    assert adapters.on_host() == {"b", "c"}
    assert adapters.on_device() == {"b"}
    assert named(adapters.flush()[1]) == [("a", Tier.DEVICE), ("a", Tier.HOST)]
    adapters.seat(adapters.acquire("b"))
    adapters.begin("c")
    assert not adapters.residency.take_copy(content("d")), "both are in use"


def test_a_copy_read_again_before_its_drop_was_handed_over_is_not_dropped() -> None:
    adapters = Adapters(max_loras=1, max_cpu_loras=1)
    adapters.register("a")
    assert adapters.residency.take_copy(content("a"))
    adapters.unload("a")
    adapters.register("a")
    assert adapters.residency.take_copy(content("a"))
    assert adapters.flush() == ([], [])


def test_a_pinned_adapter_is_loaded_from_what_was_read_to_open_it() -> None:
    adapters = Adapters(max_loras=2)
    adapters.residency.register(
        AdapterName("a"), AdapterSpec(content("a"), 8, 1), path="a", is_pinned=True
    )
    assert adapters.residency.take_copy(content("a")), "its load is under way, and need not read"
