"""Drafts in plans and results: the same tokens in fewer steps, and nothing kept of wrong guesses.

With the fake runner, which raises where a step reads what was not written (P11, V01, V03).
"""

from __future__ import annotations

import json

import pytest

from manyroots.bench.recorded_drafts import RecordedDrafts
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.messages import Submit
from manyroots.step import StepResult
from tests.helpers.cache_harness import recurrent, window
from tests.helpers.scheduler_harness import VOCAB, SchedulerHarness, expected_tokens, submit


def drafting(
    requests: list[Submit], acceptance: float, num_tokens: int = 4, **settings: object
) -> SchedulerHarness:
    """A scheduler whose guesses are right with this probability."""
    source = RecordedDrafts(acceptance, vocab_size=VOCAB)
    for request in requests:
        source.record(request.prompt, expected_tokens(request))
    config = json.dumps(
        {"method": "suffix", "num_speculative_tokens": num_tokens, "adaptive": False}
    )
    return SchedulerHarness(
        speculative_config=config, draft_source=source, max_num_seqs=4, **settings
    )  # type: ignore[arg-type]


def several(count: int = 6, max_tokens: int = 21) -> list[Submit]:
    return [
        submit(number, [number, 7, 7, number % 3, 9], max_tokens=max_tokens + number)
        for number in range(1, count + 1)
    ]


MIXES = {
    "full": (Capacity(FULL_ATTENTION, 64),),
    "full and window": (Capacity(FULL_ATTENTION, 64), Capacity(window(6, 4), 64)),
    "little memory": (Capacity(FULL_ATTENTION, 14),),
    "full and state": (Capacity(FULL_ATTENTION, 64), Capacity(recurrent(2), 16)),
    "state": (Capacity(recurrent(1), 16),),
}


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("mix", MIXES)
def test_v01_tokens_are_the_same_with_drafts(mix: str, acceptance: float) -> None:
    """V01, V03, V04, P11: with any share of right guesses; every read of a page and of a state is
    checked."""
    requests = several()
    harness = drafting(requests, acceptance, capacities=MIXES[mix])
    for request in requests:
        harness.loop.handle(request)
    harness.run()
    for request in requests:
        assert harness.tokens(request.request_id) == expected_tokens(request)
    stats = harness.scheduler.stats()
    assert stats.speculation is not None
    told = stats.speculation
    assert told.total_draft_tokens > 0
    if acceptance in (0.0, 1.0):
        assert told.total_accepted_tokens == acceptance * told.total_draft_tokens
    assert sum(told.accepted_by_place) == told.total_accepted_tokens
    assert stats.num_held_pages == 0


def test_v01_right_drafts_take_fewer_steps() -> None:
    request = submit(1, [1, 2, 3], max_tokens=41)
    steps = {}
    for acceptance in (0.0, 1.0):
        harness = drafting([request], acceptance)
        harness.loop.handle(request)
        harness.run()
        steps[acceptance] = harness.scheduler.stats().total_steps
    assert steps[0.0] == 41
    assert steps[1.0] == 9  # the first token, then five a step


def test_v03_pages_of_wrong_guesses_are_free_before_the_next_plan() -> None:
    """V03, P11: a page that only wrong guesses reached is free when their result is processed, and
    nothing of it can be found."""
    request = submit(1, [1, 2, 3], max_tokens=12)
    harness = drafting([request], 0.0, num_tokens=8)
    harness.scheduler.submit(request)
    plan = harness.scheduler.schedule()
    assert plan is not None
    harness.scheduler.advance(harness.runner.execute(plan))
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert len(plan.drafts[0].tokens) == 8
    assert harness.scheduler.stats().num_held_pages == 3  # 4 known tokens and 8 guesses
    assert harness.scheduler.schedule() is None, "planned while guesses are checked"
    harness.scheduler.advance(harness.runner.execute(plan))
    assert harness.scheduler.stats().num_held_pages == 1


def test_v03_guesses_do_not_take_the_last_pages() -> None:
    """V03: rows that are sure of their tokens come first: no request is preempted for a guess."""
    requests = several(3, max_tokens=12)
    harness = drafting(requests, 0.0, num_tokens=8, capacities=(Capacity(FULL_ATTENTION, 15),))
    for request in requests:
        harness.loop.handle(request)
    harness.run()
    assert harness.scheduler.stats().total_retractions == 0
    for request in requests:
        assert harness.tokens(request.request_id) == expected_tokens(request)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_v01_a_request_that_is_aborted_while_guesses_are_checked_leaves_nothing(
    acceptance: float,
) -> None:
    request = submit(1, [1, 2, 3], max_tokens=30)
    harness = drafting([request], acceptance, num_tokens=8)
    harness.scheduler.submit(request)
    plan = harness.scheduler.schedule()
    assert plan is not None
    harness.scheduler.advance(harness.runner.execute(plan))
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert plan.drafts
    assert harness.scheduler.abort(request.request_id) is not None
    harness.scheduler.advance(harness.runner.execute(plan))
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_held_pages) == (0, 0)


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_v01_a_stop_token_and_the_last_token_end_a_request_as_without_drafts(
    num_tokens: int,
) -> None:
    """V01: no guess goes beyond the end, so that nothing after it is told or published."""
    free = expected_tokens(submit(1, [1, 2, 3], max_tokens=30))
    for stop in free[4:20:3]:
        request = submit(1, [1, 2, 3], max_tokens=17, stop_ids=(stop,), min_tokens=2)
        harness = drafting([request], 1.0, num_tokens=num_tokens)
        harness.loop.handle(request)
        harness.run()
        assert harness.tokens(request.request_id) == expected_tokens(request)
        assert harness.last(1).finish_reason is not None


def test_v02_guesses_come_from_the_namespace_alone() -> None:
    """V02: what a tenant was told is guessed for the same tenant, and for no other."""
    config = json.dumps({"method": "suffix", "prompt_lookup_min": 1, "adaptive": False})
    first = submit(1, [1, 2, 3], max_tokens=20)
    for salt, is_guessed in (("a", True), ("b", False)):
        harness = SchedulerHarness(speculative_config=config)
        harness.loop.handle(submit(1, [1, 2, 3], max_tokens=20, salt="a"))
        harness.run()
        before = harness.scheduler.stats().speculation
        harness.loop.handle(submit(2, [1, 2, 3], max_tokens=20, salt=salt))
        harness.run()
        after = harness.scheduler.stats().speculation
        assert before is not None
        assert after is not None
        assert (after.total_accepted_tokens > before.total_accepted_tokens) == is_guessed
        assert harness.tokens(2) == expected_tokens(first)


def adaptive(acceptance: float, cost: float, max_tokens: int = 400) -> tuple[float, int]:
    """How long a request takes, and how many tokens are drafted, where a step that waits for the
    last result costs so much of one that does not."""
    request = submit(1, [1, 2, 3], max_tokens=max_tokens)
    source = RecordedDrafts(acceptance, vocab_size=VOCAB)
    source.record(request.prompt, expected_tokens(request))
    harness = SchedulerHarness(
        speculative_config='{"method": "suffix"}', draft_source=source, num_pages=256
    )
    scheduler, runner = harness.scheduler, harness.runner
    scheduler.submit(request)
    launched: list[StepResult] = []
    seconds = 0.0
    while scheduler.has_work:
        if launched and scheduler.awaits_result:
            scheduler.advance(launched.pop(0), cost)
            seconds += cost
        plan = scheduler.schedule()
        if plan is not None:
            launched.append(runner.execute(plan))
        if len(launched) > 1 or (plan is None and launched):
            scheduler.advance(launched.pop(0), 1.0)
            seconds += 1.0
    told = scheduler.stats().speculation
    assert told is not None
    return seconds, told.total_draft_tokens


def test_v06_drafts_are_made_where_they_gain_more_than_they_cost() -> None:
    """V06: guesses that are never right, or that cost more than they gain, are hardly tried."""
    seconds, num_drafted = adaptive(acceptance=1.0, cost=1.1)
    assert seconds < 120
    assert num_drafted > 300
    seconds, num_drafted = adaptive(acceptance=0.0, cost=1.1)
    assert 400 <= seconds <= 403
    assert num_drafted < 16
    assert adaptive(acceptance=0.5, cost=1.1)[0] < 270
    assert adaptive(acceptance=0.5, cost=3.0)[0] < 450, "drafts cost three times as much"


def test_v06_nothing_is_drafted_beside_many_rows() -> None:
    requests = [submit(number, [number, 7, 7], max_tokens=9) for number in range(1, 41)]
    source = RecordedDrafts(1.0, vocab_size=VOCAB)
    for request in requests:
        source.record(request.prompt, expected_tokens(request))
    harness = SchedulerHarness(
        speculative_config='{"method": "suffix", "adaptive": false}', draft_source=source,
        num_pages=256, max_num_seqs=40, budget=256,
    )  # fmt: skip
    for request in requests:
        harness.loop.handle(request)
    harness.run()
    told = harness.scheduler.stats().speculation
    assert told is not None
    assert told.total_draft_tokens == 0
