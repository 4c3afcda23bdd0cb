"""Preparing steps, loading in the background, and what the cap counts."""

from __future__ import annotations

import itertools
import timeit

import pytest

from manyroots.ids import AdapterName, StepId, Tier
from manyroots.lora.outcomes import Readiness
from manyroots.lora.spec import AdapterSpec
from manyroots.step import AdapterLoaded, LoadId
from tests.unit.lora.adapters import Adapters, content


def loaded(max_loras: int, names: str, **sizes: int) -> Adapters:
    adapters = Adapters(max_loras, **sizes)
    for name in names:
        adapters.register(name)
    return adapters


def test_w02_too_many_adapters_are_refused_before_anything_changes() -> None:
    adapters = loaded(2, "abc")
    adapters.bring("a", "b")
    before = (adapters.residency.stats(), list(adapters.residency.slots.idle))
    with pytest.raises(RuntimeError, match="wants 3 adapters; --max-loras allows 2"):
        adapters.prepare("c", "a", "b")
    assert (adapters.residency.stats(), list(adapters.residency.slots.idle)) == before
    assert adapters.flush() == ([], [])


def test_w02_an_unknown_adapter_is_refused_before_anything_changes() -> None:
    adapters = loaded(2, "a")
    with pytest.raises(RuntimeError, match="not loaded"):
        adapters.prepare("a", "x")
    assert adapters.flush() == ([], [])


def test_w02_the_same_adapter_twice_is_one() -> None:
    adapters = loaded(1, "a")
    assert adapters.prepare("a", "a", "a") == ["a"]
    assert len(adapters.flush()[0]) == 1


def test_w03_promotion_never_evicts_an_adapter_of_the_same_step() -> None:
    """W02, W03: a is the oldest on the device and on the host, and is wanted after c is."""
    adapters = loaded(2, "abc", max_cpu_loras=2)
    adapters.bring("a", "b")
    assert adapters.prepare("c", "a") == ["c"]
    (load,), drops = adapters.flush()
    assert [drop.digest for drop in drops] == [content("b")]
    adapters.answer(load)
    assert adapters.on_device() == {"a", "c"}


def test_w03_an_adapter_waits_when_only_those_of_its_step_could_make_room() -> None:
    adapters = loaded(2, "abc")
    adapters.bring("a")
    adapters.begin("b")
    assert adapters.prepare("c", "a") == ["c"]
    assert adapters.flush() == ([], [])
    assert adapters.on_device() == {"a", "b"}


def test_w03_a_host_copy_of_the_same_step_is_not_dropped_for_another() -> None:
    adapters = loaded(2, "abcd", max_cpu_loras=3)
    adapters.bring("a", "b", "c")  # a is on the host alone, and the oldest there
    assert adapters.prepare("d", "a") == ["d", "a"]
    loads, drops = adapters.flush()
    assert [(load.digest, load.source) for load in loads] == [
        (content("d"), Tier.STORAGE),
        (content("a"), Tier.HOST),
    ]
    assert [drop.digest for drop in drops] == [content("b")]


def test_w10_one_load_per_adapter_at_a_time_and_each_intent_once() -> None:
    adapters = loaded(2, "a")
    adapters.prepare("a")
    (load,), _ = adapters.flush()
    for _ in range(3):
        assert adapters.prepare("a") == ["a"]
        assert adapters.flush() == ([], [])
    assert adapters.residency.readiness(content("a")) is Readiness.LOADING
    assert adapters.residency.is_loading
    assert adapters.answer(load).error is None
    assert adapters.prepare("a") == []
    assert not adapters.residency.is_loading


def test_w10_others_go_on_while_an_adapter_loads() -> None:
    adapters = loaded(3, "abc")
    running = adapters.begin("a")
    adapters.prepare("b", "c")
    slow, quick = adapters.flush()[0]
    adapters.launch(1)
    adapters.answer(quick)
    assert adapters.is_ready("c")
    assert not adapters.is_ready("b")
    adapters.seat(adapters.acquire("c"))
    adapters.launch(2)
    adapters.done(1)
    adapters.answer(slow)
    assert adapters.is_ready("b")
    assert running.slot == 0


def test_w10_a_failed_load_is_told_and_can_be_retried_from_storage() -> None:
    adapters = loaded(1, "ab", max_cpu_loras=2)
    adapters.bring("a", "b")
    adapters.prepare("a")
    (load,), _ = adapters.flush()
    assert load.source is Tier.HOST
    outcome = adapters.answer(load, "no memory")
    assert (outcome.digest, outcome.error) == (content("a"), "no memory")
    assert adapters.residency.readiness(content("a")) is Readiness.ABSENT
    assert adapters.on_host() == {"b"}
    adapters.prepare("a")
    (again,), _ = adapters.flush()
    assert again.source is Tier.STORAGE
    assert again.target.slot == load.target.slot
    assert again.target.generation > load.target.generation
    adapters.answer(again)
    assert adapters.is_ready("a")
    assert adapters.residency.stats().total_failed_loads == 1


@pytest.mark.parametrize("error", [None, "bad file"])
def test_w10_an_adapter_unloaded_while_it_loads_is_dropped_at_the_answer(error: str | None) -> None:
    adapters = loaded(1, "ab")
    adapters.prepare("a")
    (load,), _ = adapters.flush()
    assert adapters.unload("a").freed == (content("a"),)
    assert adapters.prepare("b") == ["b"]
    assert adapters.flush() == ([], []), "the slot is being written to"
    adapters.answer(load, error)
    assert adapters.on_host() == set()
    adapters.end_fetches()
    adapters.bring("b")


def test_w10_content_loaded_again_while_its_load_is_under_way_uses_that_load() -> None:
    adapters = loaded(1, "a")
    adapters.prepare("a")
    (load,), _ = adapters.flush()
    adapters.unload("a")
    adapters.register("a")
    assert adapters.prepare("a") == ["a"]
    assert adapters.flush() == ([], [])
    adapters.answer(load)
    assert adapters.is_ready("a")


def test_an_answer_to_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="load 7 was answered"):
        loaded(1, "a").residency.acknowledge(AdapterLoaded(LoadId(7), None))


def test_l01_the_cap_counts_adapters_not_requests() -> None:
    adapters = loaded(2, "abc", num_spare_slots=1)
    adapters.bring("a", "b", "c")
    holds = [adapters.begin(name) for name in "aabba"]
    assert len({hold.slot for hold in holds}) == 2
    assert adapters.residency.readiness(content("c")) is Readiness.CAPPED
    with pytest.raises(RuntimeError, match="capped"):
        adapters.seat(adapters.acquire("c"))
    for hold in holds[2:4]:
        adapters.end(hold)
    assert adapters.is_ready("c")


def test_l03_an_adapter_that_is_not_running_uses_up_no_cap() -> None:
    adapters = loaded(1, "ab", num_spare_slots=1)
    adapters.bring("a", "b")
    blocked = adapters.acquire("a")  # waits for memory
    assert adapters.is_ready("b")
    adapters.begin("b")
    assert adapters.residency.readiness(content("a")) is Readiness.CAPPED
    adapters.end(blocked)


def test_l07_a_load_that_takes_longer_than_any_before_counts_while_it_is_under_way() -> None:
    """L07: the bound on a pause has two loads, so it must not wait for the answer."""
    adapters = loaded(1, "ab")
    adapters.bring("a")
    known = adapters.residency.longest_load_steps
    adapters.prepare("b")
    (load,), _ = adapters.flush()
    for step in range(1, known + 4):
        adapters.residency.step_launched(StepId(step))
        adapters.residency.step_done(StepId(step))
    assert adapters.residency.longest_load_steps == known + 3
    adapters.answer(load)
    assert adapters.residency.longest_load_steps >= known + 3


def test_l07_running_requests_keep_their_slot_whatever_is_wanted() -> None:
    """L07: also in steps that they are not part of, such as a chunked prefill out of budget."""
    adapters = loaded(2, "abc")
    holds = [adapters.begin("a"), adapters.begin("b")]
    slots = [hold.slot for hold in holds]
    for step_id in range(1, 4):
        assert adapters.prepare("c") == ["c"]
        assert adapters.flush() == ([], [])
        adapters.launch(step_id)
        adapters.done(step_id)
    assert [hold.slot for hold in holds] == slots


def test_a_slot_is_not_reused_before_every_step_launched_with_it_is_done() -> None:
    """Depth 1: steps k and k+1 are both in flight when the request turns out to have ended."""
    adapters = loaded(1, "ab")
    request = adapters.begin("a")
    adapters.launch(1)
    adapters.launch(2)
    adapters.end(request)
    for step_id in (1, 2):
        adapters.prepare("b")
        assert adapters.flush() == ([], [])
        adapters.done(step_id)
    adapters.end_fetches()
    adapters.prepare("b")
    assert len(adapters.flush()[0]) == 1


def test_a_slot_used_again_waits_for_the_later_step() -> None:
    adapters = loaded(1, "ab")
    adapters.end(adapters.begin("a"))
    adapters.launch(1)
    adapters.end(adapters.begin("a"))
    adapters.launch(2)
    again = adapters.begin("a")
    adapters.launch(3)
    adapters.end(again)
    for step_id in (1, 2, 3):
        adapters.prepare("b")
        assert adapters.flush() == ([], [])
        adapters.done(step_id)
    adapters.end_fetches()
    adapters.bring("b")


def test_steps_are_done_in_the_order_they_were_launched() -> None:
    residency = loaded(1, "a").residency
    residency.step_launched(StepId(1))
    residency.step_launched(StepId(2))
    with pytest.raises(RuntimeError, match="step 2 is done"):
        residency.step_done(StepId(2))
    with pytest.raises(RuntimeError, match="step 2 was launched after"):
        residency.step_launched(StepId(2))


def test_a_step_that_changes_nothing_is_quick_and_says_nothing() -> None:
    """64 adapters running of 1000 loaded; the bound is some twenty times what it takes."""
    names = [f"a{number}" for number in range(1000)]
    adapters = Adapters(max_loras=64)
    residency = adapters.residency
    for name in names:
        residency.register(AdapterName(name), AdapterSpec(content(name), 8, 1), path="")
    for name in names[:64]:
        adapters.begin(name)
    wanted = [content(name) for name in names[:64]]
    step_ids = map(StepId, itertools.count(1))

    def step() -> None:
        step_id = next(step_ids)
        residency.prepare(wanted)
        residency.step_launched(step_id)
        residency.step_done(step_id)

    assert min(timeit.repeat(step, number=100, repeat=5)) / 100 < 0.5e-3
    assert residency.flush() == ()
