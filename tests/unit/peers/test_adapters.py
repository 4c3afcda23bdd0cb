"""What other engines' adapter tests check (vLLM `tests/lora`, SGLang's pool, registry and drainer
tests), asked of ours. Scenarios only; docs/coming-from.md explains differences."""

from __future__ import annotations

import pytest

from manyroots.errors import NotFoundError, RequestError
from manyroots.ids import AdapterDigest, AdapterName, Tier
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import FinishReason
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.unit.lora.adapters import Adapters, content


def known(engine: SchedulerHarness, *names: str) -> None:
    for name in names:
        engine.scheduler.load_adapter(
            AdapterName(name), AdapterSpec(AdapterDigest(name.encode()), 4, 1), path=name
        )


def ask(engine: SchedulerHarness, number: int, name: str | None, **settings: int) -> list[int]:
    """Submits. Gives what the request gives alone."""
    digest = None if name is None else AdapterDigest(name.encode())
    request = submit(number, [5, 6, 7, 8, 9], adapter=name, **settings)
    engine.loop.handle(request)
    return expected_tokens(request, digest)


def test_loading_the_same_content_again_changes_nothing() -> None:
    adapters = Adapters(2)
    first = adapters.register("a")
    adapters.bring("a")
    again = adapters.register("a")
    assert again.version.serial == first.version.serial
    assert adapters.flush() == ([], [])
    assert adapters.is_ready("a")


def test_an_adapter_can_be_taken_away_and_brought_back() -> None:
    adapters = Adapters(2)
    for _ in range(3):
        adapters.register("a")
        adapters.bring("a")
        adapters.unload("a")
        adapters.flush()
        assert adapters.on_device() == adapters.on_host() == set()


def test_taking_away_what_is_not_there_is_an_error_and_harms_nothing() -> None:
    adapters = Adapters(2)
    adapters.register("a")
    adapters.bring("a")
    with pytest.raises(NotFoundError):
        adapters.unload("b")
    assert adapters.is_ready("a")


def test_the_slot_used_longest_ago_is_given_away() -> None:
    adapters = Adapters(2)
    for name in "abc":
        adapters.register(name)
    adapters.bring("a", "b")
    adapters.end(adapters.begin("a"))
    adapters.bring("c")
    assert adapters.on_device() == {"a", "c"}


def test_a_pinned_adapter_outlasts_any_number_of_others() -> None:
    adapters = Adapters(2)
    adapters.residency.register(
        AdapterName("p"), AdapterSpec(content("p"), 8, 1), path="p", is_pinned=True
    )
    (load,), _ = adapters.flush()
    adapters.answer(load)
    for number in range(6):
        adapters.register(f"x{number}")
        adapters.bring(f"x{number}")
        assert "p" in adapters.on_device()


def test_pinning_what_would_leave_no_slot_is_refused() -> None:
    adapters = Adapters(1)
    with pytest.raises(RequestError, match="can't be pinned"):
        adapters.residency.register(
            AdapterName("p"), AdapterSpec(content("p"), 8, 1), path="p", is_pinned=True
        )


def test_two_names_of_one_content_share_its_slot_and_its_pages() -> None:
    adapters = Adapters(1)
    adapters.register("a", "same")
    adapters.register("b", "same")
    one, other = adapters.begin("a"), adapters.acquire("b")
    adapters.seat(other)
    assert one.slot == other.slot
    adapters.end(one)
    adapters.unload("a")
    assert adapters.is_ready("same"), "b still means it"


def test_a_slot_given_to_another_has_another_generation() -> None:
    adapters = Adapters(1)
    for name in "ab":
        adapters.register(name)
    adapters.prepare("a")
    (first,), _ = adapters.flush()
    adapters.answer(first)
    adapters.prepare("b")
    (second,), _ = adapters.flush()
    assert first.target is not None
    assert second.target is not None
    assert second.target.slot == first.target.slot
    assert second.target.generation > first.target.generation


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_the_order_in_which_a_step_names_adapters_does_not_decide_who_leaves(
    order: tuple[str, ...],
) -> None:
    """SGLang: iteration order of a set must not choose slots or victims."""
    adapters = Adapters(3)
    for name in "abcd":
        adapters.register(name)
    adapters.bring("a", "b", "c")
    adapters.prepare(*order)
    adapters.end(adapters.begin("a"))
    adapters.end(adapters.begin("c"))
    adapters.bring("d")
    assert adapters.on_device() == {"a", "c", "d"}


def test_rows_of_many_adapters_and_of_base_run_in_one_step_each_with_its_own() -> None:
    engine = SchedulerHarness(max_loras=4, budget=64)
    known(engine, "a", "b", "c")
    wanted = {n: ask(engine, n, name) for n, name in enumerate(["a", None, "b", "c", "a", None])}
    engine.run()
    for number, tokens in wanted.items():
        assert engine.tokens(number) == tokens


def test_base_requests_never_wait_for_an_adapter() -> None:
    engine = SchedulerHarness(max_loras=1, budget=64, finish_loads=lambda loads: [])
    known(engine, "a")
    ask(engine, 0, "a")
    tokens = ask(engine, 1, None)
    for _ in range(12):
        engine.step()
    assert engine.tokens(1) == tokens
    assert 0 not in engine.outputs


def test_an_adapter_that_is_unloaded_in_the_queue_is_still_served_to_who_waits() -> None:
    """SGLang's registry counts the requests in flight; new ones are refused at once."""
    engine = SchedulerHarness(max_loras=1, max_num_seqs=1, budget=64)
    known(engine, "a")
    wanted = {n: ask(engine, n, "a") for n in range(3)}
    engine.step()
    engine.scheduler.unload_adapter(AdapterName("a"))
    ask(engine, 9, "a")
    engine.run()
    for number, tokens in wanted.items():
        assert engine.tokens(number) == tokens
    assert engine.last(9).finish_reason is FinishReason.ERROR


def test_unloading_while_its_load_runs_fails_nobody_who_came_before() -> None:
    engine = SchedulerHarness(max_loras=1, budget=64)
    known(engine, "a")
    tokens = ask(engine, 0, "a")
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.adapters
    engine.scheduler.unload_adapter(AdapterName("a"))
    engine.scheduler.advance(engine.runner.execute(plan))
    engine.run()
    assert engine.tokens(0) == tokens


def test_more_adapters_than_slots_all_get_their_turn() -> None:
    engine = SchedulerHarness(max_loras=2, budget=64, max_num_seqs=4)
    names = [f"n{number}" for number in range(9)]
    known(engine, *names)
    wanted = {n: ask(engine, n, name, max_tokens=6) for n, name in enumerate(names)}
    engine.run()
    for number, tokens in wanted.items():
        assert engine.tokens(number) == tokens


def test_an_adapters_hit_is_its_own_whatever_base_and_others_have() -> None:
    engine = SchedulerHarness(max_loras=4, budget=64)
    known(engine, "a", "b")
    found = []
    for number, name in enumerate([None, "a", "b", None, "a", "b"]):
        ask(engine, number, name)
        engine.run()
        found.append(engine.last(number).num_cached_tokens)
    assert found == [0, 0, 0, 4, 4, 4]


def test_a_name_that_was_never_loaded_is_an_error_and_not_base() -> None:
    engine = SchedulerHarness(max_loras=1)
    ask(engine, 0, "ghost")
    engine.run()
    assert engine.last(0).finish_reason is FinishReason.ERROR
    assert engine.tokens(0) == []


def test_loads_are_counted_by_where_they_came_from() -> None:
    adapters = Adapters(1)
    for name in "ab":
        adapters.register(name)
    adapters.bring("a", "b", "a")
    stats = adapters.residency.stats()
    assert (stats.total_loads_from_storage, stats.total_loads_from_host) == (2, 1)
    assert stats.total_device_evictions == 2
    assert adapters.residency.whereabouts(AdapterName("b")) is Tier.HOST
