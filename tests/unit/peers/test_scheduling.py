"""What other engines' scheduler tests check (vLLM `tests/v1/core`, SGLang's scheduler tests), asked
of ours. Scenarios only; where we answer differently, docs/coming-from.md says why."""

from __future__ import annotations

import random

import pytest

from manyroots.errors import RequestError
from manyroots.ids import RequestId
from manyroots.messages import Abort, FinishReason
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.unit.peers.plans import Stepping


def test_all_that_fit_the_budget_begin_in_the_first_step() -> None:
    engine = Stepping(budget=64, num_pages=64)
    engine.take(*(submit(i, [i] * 6) for i in range(8)))
    assert engine.one() == dict.fromkeys(range(8), 6)
    assert engine.scheduler.stats().num_running == 8


def test_no_more_rows_run_than_there_are() -> None:
    engine = Stepping(max_num_seqs=3, budget=64)
    engine.take(*(submit(i, [i] * 5, max_tokens=3) for i in range(7)))
    steps = engine.all()
    assert max(len(step) for step in steps) == 3
    assert engine.began() == list(range(7))


def test_a_prompt_over_the_budget_is_cut_and_its_rest_goes_on_beside_the_next() -> None:
    engine = Stepping(budget=16, num_pages=64)
    engine.take(*(submit(i, list(range(10 * i, 10 * i + 12)), max_tokens=2) for i in range(3)))
    steps = engine.all()
    assert steps[0] == {0: 12, 1: 4}
    assert steps[1] == {0: 1, 1: 8, 2: 7}
    for number in range(3):
        assert sum(step.get(number, 0) for step in steps) == 12 + 1


def test_a_prompt_much_over_the_budget_takes_as_many_steps_as_it_needs() -> None:
    engine = Stepping(budget=8, num_pages=64)
    engine.take(submit(0, list(range(30)), max_tokens=1))
    assert [step[0] for step in engine.all()] == [8, 8, 8, 6]


def test_with_a_limit_of_its_own_no_prompt_fills_the_step() -> None:
    engine = Stepping(budget=32, chunk=5, num_pages=64)
    engine.take(*(submit(i, [i] * 12, max_tokens=1) for i in range(4)))
    assert engine.one() == dict.fromkeys(range(4), 5)
    assert engine.one() == dict.fromkeys(range(4), 5)
    assert engine.one() == dict.fromkeys(range(4), 2)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    engine = Stepping(budget=8, num_pages=64, page_size=4)
    engine.take(*(submit(i, [i + 1], max_tokens=20) for i in range(3)))
    engine.one()
    engine.take(submit(9, list(range(20)), max_tokens=2))
    assert engine.one() == {0: 1, 1: 1, 2: 1, 9: 5}


def test_a_long_prompt_in_front_is_not_passed_by_a_short_one() -> None:
    """vLLM: order is that of arrival, chunked or not."""
    engine = Stepping(budget=8, num_pages=64)
    engine.take(submit(0, [1] * 20), submit(1, [2] * 2))
    assert engine.one() == {0: 8}


def test_a_request_that_lacks_pages_is_not_passed_by_a_smaller_one_for_ever() -> None:
    engine = Stepping(budget=64, num_pages=8, page_size=4)
    engine.take(submit(0, [1] * 10, max_tokens=8), submit(1, [2] * 24, max_tokens=2))
    for number in range(2, 40):
        engine.take(submit(number, [number] * 5, max_tokens=3))
    engine.all()
    began = engine.began()
    assert began.index(1) < len(began) - 1, "it came before the last of the small ones"
    assert engine.tokens(1) == expected_tokens(submit(1, [2] * 24, max_tokens=2))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_exactly_so_many_tokens_come_whether_or_not_steps_overlap(
    depth: int, max_tokens: int
) -> None:
    engine = SchedulerHarness(depth=depth)
    request = submit(0, [5, 6, 7], max_tokens=max_tokens)
    engine.loop.handle(request)
    engine.run()
    assert engine.tokens(0) == expected_tokens(request)
    assert engine.last(0).finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats().total_step_tokens == 3 + max_tokens - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_ends_a_request_and_is_its_last_token(depth: int) -> None:
    alone = expected_tokens(submit(0, [3, 4], max_tokens=20))
    stop = alone[6]
    engine = SchedulerHarness(depth=depth)
    engine.loop.handle(submit(0, [3, 4], max_tokens=20, stop_ids=(stop,)))
    engine.run()
    assert engine.tokens(0) == alone[: alone.index(stop) + 1]
    assert engine.last(0).finish_reason is FinishReason.STOP


def test_only_the_request_with_the_stop_token_ends_by_it() -> None:
    alone = expected_tokens(submit(0, [3, 4], max_tokens=12))
    engine = SchedulerHarness()
    engine.loop.handle(submit(0, [3, 4], max_tokens=12, stop_ids=(alone[2],)))
    engine.loop.handle(submit(1, [3, 4], max_tokens=12))
    engine.run()
    assert engine.tokens(1) == alone
    assert len(engine.tokens(0)) <= 3


def test_a_request_ends_where_the_context_ends() -> None:
    engine = SchedulerHarness(max_model_len=20)
    engine.loop.handle(submit(0, [1] * 15, max_tokens=5))
    engine.run()
    assert len(engine.tokens(0)) == 5
    assert engine.last(0).finish_reason is FinishReason.LENGTH


def test_two_requests_cannot_have_one_id() -> None:
    engine = SchedulerHarness()
    engine.loop.handle(submit(0, [1, 2]))
    with pytest.raises((RequestError, RuntimeError, ValueError)):
        engine.scheduler.submit(submit(0, [3, 4]))


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_at_any_moment_leaves_nothing_and_harms_nobody(depth: int, num_steps: int) -> None:
    """Waiting, in the middle of a prompt, with a step in flight, decoding, over."""
    engine = SchedulerHarness(budget=8, depth=depth, num_pages=32)
    other = submit(1, [9, 8, 7, 6, 5], max_tokens=6)
    engine.loop.handle(submit(0, list(range(20)), max_tokens=3))
    engine.loop.handle(other)
    for _ in range(num_steps):
        if engine.loop.has_work:
            engine.step()
    engine.loop.handle(Abort([RequestId(0)]))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_pages) == (0, 0, 0)
    assert engine.tokens(1) == expected_tokens(other)


def test_an_abort_of_an_unknown_or_ended_request_says_nothing_and_changes_nothing() -> None:
    engine = SchedulerHarness()
    engine.loop.handle(submit(0, [1, 2, 3]))
    engine.run()
    before = engine.scheduler.stats()
    assert engine.scheduler.abort(RequestId(0)) is None
    assert engine.scheduler.abort(RequestId(77)) is None
    assert engine.scheduler.stats() == before


def test_many_aborted_at_once_give_all_pages_back() -> None:
    engine = SchedulerHarness(max_num_seqs=8, budget=64, num_pages=64)
    for number in range(30):
        engine.loop.handle(submit(number, [number, 1, 2, 3, 4], max_tokens=9))
    engine.step()
    engine.step()
    for number in range(0, 30, 2):
        engine.loop.handle(Abort([RequestId(number)]))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_held_pages == stats.num_running == stats.num_waiting == 0
    for number in range(1, 30, 2):
        assert engine.last(number).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_of_an_aborted_request_are_not_used_again_before_its_step_is_done(depth: int) -> None:
    """vLLM's deferred free: the runner still writes them, and the fake one's memory would show."""
    engine = SchedulerHarness(num_pages=6, page_size=4, depth=depth, max_num_seqs=2)
    for number in range(12):
        request = submit(number, [number + 1] * 9, max_tokens=8)
        engine.loop.handle(request)
        engine.step()
        if number % 2:
            engine.loop.handle(Abort([RequestId(number)]))
    engine.run()
    for number in range(0, 12, 2):
        request = submit(number, [number + 1] * 9, max_tokens=8)
        assert engine.tokens(number) == expected_tokens(request)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_that_comes_for_a_retracted_request_is_kept_once(depth: int) -> None:
    """vLLM: preempted while its step runs. Nothing is lost, nothing comes twice."""
    engine = SchedulerHarness(num_pages=9, page_size=4, depth=depth, max_num_seqs=3)
    requests = [submit(i, [i + 1] * 7, max_tokens=15) for i in range(3)]
    for request in requests:
        engine.loop.handle(request)
    engine.run()
    assert engine.scheduler.stats().total_retractions > 0
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)


def test_a_retracted_request_can_be_aborted_while_it_waits() -> None:
    engine = SchedulerHarness(num_pages=9, page_size=4, max_num_seqs=3)
    for number in range(3):
        engine.loop.handle(submit(number, [number + 1] * 7, max_tokens=15))
    while engine.scheduler.stats().total_retractions == 0:
        engine.step()
    for number in range(3):
        engine.loop.handle(Abort([RequestId(number)]))
    engine.run()
    assert engine.scheduler.stats().num_held_pages == 0


def test_with_room_for_all_nobody_is_retracted() -> None:
    engine = SchedulerHarness(num_pages=64, page_size=4, max_num_seqs=8, budget=64)
    for number in range(8):
        engine.loop.handle(submit(number, [number] * 8, max_tokens=20))
    engine.run()
    assert engine.scheduler.stats().total_retractions == 0


def test_one_request_that_fills_the_whole_pool_is_served() -> None:
    engine = SchedulerHarness(num_pages=8, page_size=4, budget=16, max_model_len=32)
    request = submit(0, list(range(20)), max_tokens=12)
    engine.loop.handle(request)
    engine.run()
    assert engine.tokens(0) == expected_tokens(request)


def test_after_everything_all_pages_are_free_or_cached() -> None:
    """vLLM's memory leak test: a mix of ends, retractions, aborts and stops."""
    engine = SchedulerHarness(num_pages=16, page_size=4, max_num_seqs=4, budget=12)
    for number in range(40):
        stop = (number % 50,) if number % 3 == 0 else ()
        engine.loop.handle(submit(number, [number % 7] * (3 + number % 9), stop_ids=stop))
        engine.step()
        if number % 5 == 0:
            engine.loop.handle(Abort([RequestId(number - 1)]))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert stats.num_waiting == stats.num_running == 0


def test_the_same_prompt_twice_in_one_step_is_computed_once_but_for_its_end() -> None:
    """vLLM's prefill dedup, and SGLang's in-batch caching, without an order of their own."""
    engine = Stepping(budget=64, page_size=4)
    prompt = list(range(14))
    engine.take(submit(0, prompt), submit(1, prompt))
    assert engine.one() == {0: 14, 1: 2}
    engine.all()
    assert engine.tokens(0) == engine.tokens(1)


def test_a_second_turn_finds_the_first_turns_answer_too() -> None:
    engine = SchedulerHarness(page_size=4, budget=64)
    engine.loop.handle(submit(0, list(range(10)), max_tokens=9))
    engine.run()
    history = [*range(10), *engine.tokens(0)]
    engine.loop.handle(submit(1, [*history, 44, 45]))
    engine.run()
    # All but the last answer token are computed, and whole pages of those are found.
    assert engine.last(1).num_cached_tokens == (len(history) - 1) // 4 * 4


def test_ten_turns_find_all_but_what_is_new() -> None:
    engine = SchedulerHarness(page_size=4, budget=64, num_pages=128)
    history, num_known = list(range(7)), 1
    for turn in range(10):
        engine.loop.handle(submit(turn, history, max_tokens=5))
        engine.run()
        assert engine.last(turn).num_cached_tokens == (num_known - 1) // 4 * 4
        history = [*history, *engine.tokens(turn)]
        num_known = len(history)
        history = [*history, turn, turn + 1, turn + 2]


def test_a_failed_step_does_not_stop_those_that_wait() -> None:
    engine = SchedulerHarness(max_num_seqs=1)
    engine.loop.handle(submit(0, [1, 2, 3]))
    engine.loop.handle(submit(1, [4, 5, 6]))
    engine.runner.fail_next = "planted"
    engine.run()
    assert engine.last(0).finish_reason is FinishReason.ERROR
    assert engine.tokens(1) == expected_tokens(submit(1, [4, 5, 6]))


def test_lookups_are_counted_once_however_often_a_request_is_tried() -> None:
    """vLLM: a request that finds no room is looked up again every step, and counts once."""
    engine = SchedulerHarness(num_pages=8, page_size=4, max_num_seqs=4, budget=64)
    engine.loop.handle(submit(0, [1] * 20, max_tokens=12))
    engine.loop.handle(submit(1, [2] * 20, max_tokens=2))
    engine.run()
    assert engine.scheduler.stats().total_lookup_tokens == 40


def test_nothing_is_counted_as_looked_up_with_caching_off() -> None:
    engine = SchedulerHarness(reuse=False)
    for number in range(3):
        engine.loop.handle(submit(number, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
        engine.run()
    stats = engine.scheduler.stats()
    assert (stats.total_lookup_tokens, stats.total_hit_tokens, stats.num_cached_pages) == (0, 0, 0)


def test_waiting_and_running_are_counted_as_they_are() -> None:
    engine = Stepping(max_num_seqs=2, budget=64)
    engine.take(*(submit(i, [i, i, i], max_tokens=4) for i in range(5)))
    assert engine.scheduler.stats().num_waiting == 5
    engine.one()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_the_important_begin_first_under_that_policy_alone(policy: str) -> None:
    engine = Stepping(max_num_seqs=1, budget=64, policy=policy)
    for number, priority in enumerate([5, 1, 3, 1, 0]):
        engine.take(submit(number, [number + 1] * 3, max_tokens=1, priority=priority))
    engine.all()
    assert engine.began() == ([4, 1, 3, 2, 0] if policy == "priority" else [0, 1, 2, 3, 4])


def test_of_equally_important_ones_the_first_to_come_begins() -> None:
    engine = Stepping(max_num_seqs=1, budget=64, policy="priority")
    for number in range(6):
        engine.take(submit(number, [number + 1] * 3, max_tokens=1, priority=2))
    engine.all()
    assert engine.began() == list(range(6))


def test_under_pressure_the_least_important_steps_back() -> None:
    engine = Stepping(num_pages=9, page_size=4, max_num_seqs=3, budget=64, policy="priority")
    for number, priority in enumerate([2, 0, 1]):
        engine.take(submit(number, [number + 1] * 7, max_tokens=15, priority=priority))
    engine.all()
    again = [number for number in engine.began() if engine.began().count(number) > 1]
    assert again, "there was no pressure"
    assert 1 not in again, "the most important one lost its row"
    assert 0 in again


def test_equals_do_not_take_each_others_rows() -> None:
    engine = Stepping(max_num_seqs=2, budget=64, policy="priority", num_pages=64)
    engine.take(*(submit(i, [i + 1] * 3, max_tokens=6, priority=1) for i in range(6)))
    engine.all()
    assert engine.began() == list(range(6))
    assert engine.scheduler.stats().total_retractions == 0


def test_who_was_put_out_by_a_more_important_one_resumes_exactly() -> None:
    engine = Stepping(max_num_seqs=2, budget=64, policy="priority", num_pages=64)
    low = [submit(i, [i + 1] * 3, max_tokens=12, priority=9) for i in range(2)]
    engine.take(*low)
    engine.one()
    engine.one()
    urgent = submit(7, [40, 41, 42], max_tokens=3, priority=0)
    engine.take(urgent)
    first = engine.one()
    second = engine.one()
    assert 7 in first or 7 in second, "it need not wait for a row"
    engine.all()
    for request in (*low, urgent):
        assert engine.tokens(request.request_id) == expected_tokens(request)


@pytest.mark.parametrize("seed", range(8))
def test_priorities_at_random_under_pressure_all_end_with_their_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    engine = SchedulerHarness(
        num_pages=14, page_size=4, max_num_seqs=4, budget=16, policy="priority"
    )
    requests = []
    for number in range(25):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 14))]
        request = submit(number, prompt, max_tokens=rng.randint(1, 12), priority=rng.randint(-3, 3))
        requests.append(request)
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 3)):
            if engine.loop.has_work:
                engine.step()
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)
    assert engine.scheduler.stats().num_held_pages == 0
