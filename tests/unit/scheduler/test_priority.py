"""Priority: which request gives way when rows or pages are short, with the priority policy
(L08)."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from manyroots.ids import RequestId
from manyroots.messages import Abort
from manyroots.scheduler.request import Request
from manyroots.step import Plan, StepResult
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.unit.scheduler.test_adapters import load

MAX_TOKENS = 24


def watch_retractions(engine: SchedulerHarness) -> list[tuple[int, list[int]]]:
    """For each retraction to come: whose priority, and the priorities of those that ran on."""
    seen: list[tuple[int, list[int]]] = []
    departures = engine.scheduler._departures
    retract = departures.retract

    def watched(request: Request, step_id: object) -> None:
        others = [r.submit.priority for r in engine.scheduler._rows.running if r is not request]
        seen.append((request.submit.priority, others))
        retract(request, step_id)  # type: ignore[arg-type]

    departures.retract = watched  # type: ignore[method-assign,assignment]
    return seen


def watch_plans(engine: SchedulerHarness) -> list[list[tuple[int, int]]]:
    """For each step to come: whose tokens it computes, and how many."""
    seen: list[list[tuple[int, int]]] = []
    launch = engine.runner.launch
    sitting: dict[int, int] = {}

    def watched(plan: Plan) -> Future[StepResult]:
        sitting.update({int(a.row): int(a.request_id) for a in plan.arrivals})
        parts = zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)
        seen.append([(sitting[row], num_tokens) for row, num_tokens in parts])
        return launch(plan)

    engine.runner.launch = watched  # type: ignore[method-assign]
    return seen


def running(engine: SchedulerHarness) -> list[int]:
    return sorted(int(r.submit.request_id) for r in engine.scheduler._rows.running)


@pytest.mark.parametrize("seed", range(30))
def test_l08_under_memory_pressure_the_important_request_stays(seed: int) -> None:
    """L08: all requests grow beyond the memory, and one is important. It is never retracted, those
    that are less important are, and all give what each gives alone."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    engine = SchedulerHarness(
        policy="priority",
        num_pages=48 // page_size,
        page_size=page_size,
        max_num_seqs=6,
        depth=rng.choice([0, 1]),
        chunk=rng.choice([None, 2]),
    )
    retractions = watch_retractions(engine)
    important = rng.randrange(6)
    requests = [
        submit(
            number,
            [number, *(rng.randrange(9) for _ in range(rng.randint(2, 8)))],
            max_tokens=MAX_TOKENS,
            priority=0 if number == important else 1,
        )
        for number in range(6)
    ]
    for request in requests:
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()
    assert retractions
    assert all(priority == 1 for priority, _ in retractions)
    for request in requests:
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)


@pytest.mark.parametrize("seed", range(10))
def test_l08_nobody_is_retracted_while_somebody_less_important_runs_on(seed: int) -> None:
    """L08: many levels, arrivals at any time, rows and pages both short, aborts between."""
    rng = random.Random(seed)
    engine = SchedulerHarness(
        policy="priority",
        num_pages=rng.choice([12, 16, 24]),
        page_size=4,
        max_num_seqs=rng.choice([2, 4, 6]),
        depth=rng.choice([0, 1]),
    )
    retractions = watch_retractions(engine)
    requests = []
    for number in range(30):
        prompt = [number, *(rng.randrange(9) for _ in range(rng.randint(2, 12)))]
        request = submit(
            number, prompt, max_tokens=rng.randint(1, MAX_TOKENS), priority=rng.randrange(4)
        )
        requests.append(request)
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            engine.loop.handle(Abort([RequestId(rng.randrange(number + 1))]))
    engine.run()
    assert retractions
    assert not [1 for priority, others in retractions if max(others, default=0) > priority]
    for request in requests:
        got = engine.tokens(int(request.request_id))
        assert got == expected_tokens(request)[: len(got)]


def test_l08_an_important_arrival_takes_the_least_important_row() -> None:
    """L08: all rows are taken; at once the arrival runs in place of the least important, which
    resumes later and gives the same tokens."""
    engine = SchedulerHarness(policy="priority", max_num_seqs=3, num_pages=128)
    requests = [
        submit(number, [number, 1, 2], max_tokens=MAX_TOKENS, priority=priority)
        for number, priority in enumerate([2, 3, 1])
    ]
    for request in requests:
        engine.loop.handle(request)
    for _ in range(4):
        engine.step()
    assert running(engine) == [0, 1, 2]
    late = submit(9, [9, 9, 9], max_tokens=4, priority=0)
    engine.loop.handle(late)
    engine.step()
    assert running(engine) == [0, 2, 9]
    assert engine.scheduler.stats().total_retractions == 1
    engine.run()
    assert engine.scheduler.stats().total_retractions == 1
    for request in (*requests, late):
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)


def test_l08_a_burst_of_important_arrivals_takes_as_many_rows_in_one_step() -> None:
    engine = SchedulerHarness(policy="priority", max_num_seqs=4, num_pages=128)
    for number in range(4):
        engine.loop.handle(submit(number, [number, 1], max_tokens=30, priority=5))
    for _ in range(4):
        engine.step()
    for number in range(10, 13):
        engine.loop.handle(submit(number, [number, 1], max_tokens=30, priority=4))
    engine.step()
    assert running(engine)[1:] == [10, 11, 12]
    engine.run()


def test_l08_an_important_arrival_takes_pages() -> None:
    """L08: rows are free, pages are not."""
    engine = SchedulerHarness(policy="priority", max_num_seqs=8, num_pages=12, page_size=4)
    for number in range(3):
        engine.loop.handle(submit(number, [number] * 12, max_tokens=4, priority=1 + number))
    for _ in range(2):
        engine.step()
    assert running(engine) == [0, 1, 2]
    engine.loop.handle(submit(9, [9] * 14, max_tokens=4, priority=0))
    engine.step()
    assert 9 in running(engine)
    assert 0 in running(engine)
    engine.run()
    assert len(engine.tokens(9)) == 4


@pytest.mark.parametrize("policy", ["priority", "fcfs", "pack", "fair"])
def test_l08_equals_never_take_each_others_place(policy: str) -> None:
    """L08: without strict importance, rows change hands only when they are given up."""
    engine = SchedulerHarness(policy=policy, max_num_seqs=2, num_pages=128)
    for number in range(12):
        engine.loop.handle(submit(number, [number, 1, 2], max_tokens=9, priority=3))
        engine.step()
    engine.run()
    assert engine.scheduler.stats().total_retractions == 0


def test_l08_one_that_finds_no_room_keeps_the_less_important_out() -> None:
    """L08: the important one waits for an equal's pages; what is less important and would fit
    does not begin, since it would only be in the way again."""
    engine = SchedulerHarness(policy="priority", max_num_seqs=8, num_pages=12, page_size=4)
    engine.loop.handle(submit(0, [0] * 28, max_tokens=12, priority=0))
    engine.step()
    engine.step()
    engine.loop.handle(submit(1, [1] * 20, max_tokens=4, priority=0))
    engine.loop.handle(submit(2, [2] * 2, max_tokens=2, priority=1))
    for _ in range(3):
        engine.step()
    assert running(engine) == [0]
    engine.run()
    assert list(engine.outputs) == [0, 1, 2]
    assert engine.scheduler.stats().total_retractions == 0


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_l08_an_important_arrival_comes_before_the_rest_of_a_long_prompt(policy: str) -> None:
    """L08: a budget of 8 and a prompt of 150 that is under way. With `priority` the important
    arrival of 6 tokens is in the next step, and the long prompt has the 2 that are left; with any
    other policy the prompt goes on as if nothing had come."""
    engine = SchedulerHarness(policy=policy, budget=8, num_pages=128)
    is_by_priority = policy == "priority"
    long = submit(1, [n % 50 for n in range(150)], priority=int(is_by_priority))
    short = submit(2, [7, 8, 9, 10, 11, 12], max_tokens=2)
    plans = watch_plans(engine)
    engine.loop.handle(long)
    engine.step()
    engine.step()
    plans.clear()
    engine.loop.handle(short)
    engine.step()
    assert plans[0] == ([(2, 6), (1, 2)] if is_by_priority else [(1, 8)])
    engine.run()
    for request in (long, short):
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)
    assert engine.scheduler.stats().total_retractions == 0


def test_l08_prompts_under_way_and_arrivals_share_a_step_by_importance() -> None:
    """L08: prompts of importance 1 and 3 are under way, requests of 0, 2 and 4 arrive. The step's
    budget goes to them in this order, and each gives what it gives alone."""
    engine = SchedulerHarness(policy="priority", budget=14, chunk=3, num_pages=256)
    requests = [
        submit(number, [number] * (40 if number % 2 else 3), priority=number)
        for number in (1, 3, 0, 2, 4)
    ]
    plans = watch_plans(engine)
    for request in requests[:2]:
        engine.loop.handle(request)
    engine.step()
    plans.clear()
    for request in requests[2:]:
        engine.loop.handle(request)
    engine.step()
    assert plans[0] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 2)]
    engine.run()
    for request in requests:
        assert engine.tokens(int(request.request_id)) == expected_tokens(request)


@pytest.mark.parametrize("depth", [0, 1])
def test_l08_one_that_finds_no_room_keeps_the_less_important_of_other_adapters_out(
    depth: int,
) -> None:
    """L08: as above, where the less important request has an adapter and so its own lane."""
    engine = SchedulerHarness(
        policy="priority", num_pages=12, page_size=4, max_loras=2, depth=depth
    )
    load(engine, "a")
    engine.loop.handle(submit(9, [9, 9], max_tokens=1, adapter="a"))
    engine.run()  # its weights are on the device from now on
    engine.loop.handle(submit(0, [0] * 28, max_tokens=12, priority=0))
    engine.step()
    engine.loop.handle(submit(1, [1] * 20, max_tokens=4, priority=0))
    engine.loop.handle(submit(2, [2] * 2, max_tokens=2, priority=1, adapter="a"))
    engine.loop.handle(submit(3, [3] * 2, max_tokens=2, priority=0, adapter="a"))
    engine.run()
    first_outputs = [number for number in engine.outputs if number != 9]
    assert first_outputs == [0, 3, 1, 2], "an equal may begin, the less important one may not"
    assert engine.scheduler.stats().total_retractions == 0


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_c02_a_decode_that_is_taken_back_leaves_its_one_token_to_the_budget(num_rows: int) -> None:
    """C02: an important prompt takes the row of a request whose decode this step has planned. The
    step computes as many tokens as the budget allows, and not one more."""
    budget = 8
    engine = SchedulerHarness(
        policy="priority", max_num_seqs=num_rows, num_pages=128, budget=budget, depth=0
    )
    for number in range(num_rows):
        engine.loop.handle(submit(number, [number, 1], max_tokens=30, priority=1))
    while len(engine.outputs) < num_rows:
        engine.step()
    engine.loop.handle(submit(9, [9] * 40, max_tokens=4, priority=0))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [int(arrival.request_id) for arrival in plan.arrivals] == [9]
    assert int(plan.num_tokens.sum()) == budget
    assert sorted(plan.num_tokens.tolist()) == [1] * (num_rows - 1) + [budget - num_rows + 1]
    engine.scheduler.advance(engine.runner.execute(plan))
    engine.run()
    assert engine.scheduler.stats().total_retractions == 1
