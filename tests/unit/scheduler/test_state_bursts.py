"""A burst on layers with a recurrent state: one request computes the shared prefix for all (P12).

Through the scheduler and the fake runner, which raises where a step reads what belongs to other
tokens; every step is audited.
"""

from __future__ import annotations

import random

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity
from manyroots.ids import RequestId
from manyroots.messages import FinishReason
from tests.helpers.cache_harness import recurrent, window
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

PAGE = 4
SYSTEM = [(7 * place) % 45 + 3 for place in range(32)]
FULL = Capacity(FULL_ATTENTION, 200)
STATES = Capacity(recurrent(100), 40)
FAMILIES = {
    "state": (FULL, STATES),
    "window and state": (FULL, Capacity(window(6, PAGE), 200), STATES),
    "two states": (FULL, STATES, Capacity(recurrent(100), 40)),
}


def burst(
    families: str = "state", count: int = 8, head: list[int] | None = None, **settings: int | str
) -> SchedulerHarness:
    engine = SchedulerHarness(
        capacities=FAMILIES[families], **{"budget": 512, "max_model_len": 400, **settings}
    )  # type: ignore[arg-type]
    for number in range(count):
        prompt = [*(SYSTEM if head is None else head), *[number] * 9]
        engine.loop.handle(submit(number, prompt, max_tokens=3))
    return engine


def cached(engine: SchedulerHarness, count: int = 8) -> list[int]:
    """Checks every answer; gives what each request found."""
    engine.run()
    for number in range(count):
        prompt = [*SYSTEM, *[number] * 9]
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=3))
    stats = engine.scheduler.stats()
    assert stats.num_held_pages == stats.num_running == stats.num_waiting == 0
    return [engine.last(number).num_cached_tokens for number in range(count)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("families", FAMILIES)
def test_p12_a_burst_computes_a_shared_prefix_once(families: str, depth: int) -> None:
    """P12: the first request computes it in the first step, all others resume in the second one,
    also where that is planned before the first is done."""
    engine = burst(families, depth=depth)
    assert cached(engine) == [0] + [len(SYSTEM)] * 7
    assert engine.scheduler.stats().total_step_tokens == 8 * (9 + 2) + len(SYSTEM)


def test_p12_the_prefix_is_one_step_and_all_others_are_in_the_next() -> None:
    """P12: others wait for that one step alone, and for no result of it."""
    engine = burst()
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first is not None
    assert second is not None
    assert first.num_tokens.tolist() == [len(SYSTEM)]
    assert second.num_tokens.tolist() == [8] * 8, "up to the last boundary of each"
    assert [copy.is_after_model for copy in first.copies] == [True]
    restored = [copy for copy in second.copies if not copy.is_after_model]
    assert [copy.source_units.tolist() for copy in restored] == [
        first.copies[0].target_units.tolist()
    ] * 7


def test_p12_a_prefix_longer_than_a_step_is_waited_for_and_shared() -> None:
    """P12: chunk by chunk; a request of other tokens does not wait."""
    engine = burst(budget=20)
    engine.loop.handle(submit(100, [1, 2, 3, 4, 5], max_tokens=2))
    engine.step()
    assert cached(engine) == [0] + [len(SYSTEM)] * 7
    assert engine.tokens(100) == expected_tokens(submit(100, [1, 2, 3, 4, 5], max_tokens=2))


def test_p12_prompts_that_share_more_among_themselves_share_that_too() -> None:
    """P12: two groups share one system prompt, each with a text of its own after it."""
    engine = SchedulerHarness(capacities=FAMILIES["state"], budget=512, max_model_len=400)
    texts = [[40 + group] * 12 for group in range(2)]
    prompts = [[*SYSTEM, *texts[n % 2], *[n] * 5] for n in range(8)]
    for number, prompt in enumerate(prompts):
        engine.loop.handle(submit(number, prompt, max_tokens=2))
    engine.run()
    for number, prompt in enumerate(prompts):
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=2))
    found = [engine.last(number).num_cached_tokens for number in range(8)]
    assert sorted(found) == [0, 32, *[44] * 6]


def test_p12_equal_prompts_share_all_but_the_last_page() -> None:
    """P12: as with full attention, a token is always left to compute."""
    engine = SchedulerHarness(capacities=FAMILIES["state"], budget=512, max_model_len=400)
    for number in range(4):
        engine.loop.handle(submit(number, SYSTEM, max_tokens=2))
    engine.run()
    assert [engine.last(number).num_cached_tokens for number in range(4)] == [0, 28, 28, 28]


def test_p12_n01_tenants_share_nothing() -> None:
    """P12, N01: no request waits for one of another salt."""
    engine = SchedulerHarness(capacities=FAMILIES["state"], budget=512, max_model_len=400)
    for number in range(4):
        engine.loop.handle(submit(number, [*SYSTEM, number], max_tokens=2, salt=str(number % 2)))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens.tolist() == [len(SYSTEM)] * 2, "each tenant's first one"


def test_p12_a_follower_that_is_aborted_leaves_nothing() -> None:
    """P12: it holds nothing while it waits."""
    engine = burst()
    engine.step()
    assert engine.scheduler.stats().num_waiting == 7
    for number in range(1, 5):
        engine.scheduler.abort(RequestId(number))
    engine.run()
    for number in (0, 5, 6, 7):
        prompt = [*SYSTEM, *[number] * 9]
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=3))
    assert engine.scheduler.stats().num_held_pages == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_p12_others_go_on_without_a_leader_that_is_aborted(depth: int) -> None:
    """P12: the next one computes the prefix, or resumes from what the first has saved."""
    engine = burst(budget=20, depth=depth)
    engine.step()
    engine.scheduler.abort(RequestId(0))
    engine.run()
    for number in range(1, 8):
        prompt = [*SYSTEM, *[number] * 9]
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=3))
    assert engine.scheduler.stats().num_held_pages == 0
    found = sorted(engine.last(number).num_cached_tokens for number in range(1, 8))
    assert found[1:] == [len(SYSTEM)] * 6


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_p03_p12_a_step_that_fails_takes_its_state_back(depth: int) -> None:
    """P03, P12: requests of launched steps fail; the others compute the prefix anew."""
    engine = burst(depth=depth, max_num_seqs=4)
    engine.runner.fail_next = "planted fault"
    engine.run()
    failed = [n for n in range(8) if engine.last(n).finish_reason is FinishReason.ERROR]
    assert 0 in failed
    assert len(failed) < 8
    for number in set(range(8)) - set(failed):
        prompt = [*SYSTEM, *[number] * 9]
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=3))
    assert engine.scheduler.stats().num_held_pages == 0


def test_c05_p12_a_step_restores_no_state_that_it_saves_itself() -> None:
    """C05, P12: a request that begins beside one that saves a state resumes from the one before."""
    engine = SchedulerHarness(
        capacities=(FULL, Capacity(recurrent(2), 40)), budget=64, chunk=8, max_model_len=400,
        depth=0,
    )  # fmt: skip
    engine.loop.handle(submit(1, [*SYSTEM, 1], max_tokens=2))
    engine.step()
    engine.loop.handle(submit(2, [*SYSTEM[:20], 2, 3], max_tokens=2))
    engine.run()
    assert engine.last(2).num_cached_tokens == 8
    for number, prompt in ((1, [*SYSTEM, 1]), (2, [*SYSTEM[:20], 2, 3])):
        assert engine.tokens(number) == expected_tokens(submit(number, prompt, max_tokens=2))


def test_p12_a_state_without_room_is_not_waited_for_again() -> None:
    """P12: with as many states as rows nothing can be saved, and all compute their prompts."""
    engine = SchedulerHarness(
        capacities=(FULL, Capacity(recurrent(100), 4)),
        budget=512, max_model_len=400, max_num_seqs=4,
    )  # fmt: skip
    for number in range(8):
        engine.loop.handle(submit(number, [*SYSTEM, *[number] * 9], max_tokens=3))
    cached(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("seed", range(4))
def test_p12_random_bursts_give_each_request_its_own_tokens(policy: str, seed: int) -> None:
    """P12: few pages and states, chunks, retractions, aborts and failing steps."""
    rng = random.Random(f"{policy} {seed}")
    engine = SchedulerHarness(
        capacities=(Capacity(FULL_ATTENTION, 60), Capacity(recurrent(rng.choice([2, 5])), 9)),
        budget=rng.choice([24, 64]), max_model_len=120, max_num_seqs=6, policy=policy,
        depth=rng.choice([0, 1, 2]),
    )  # fmt: skip
    heads = [[rng.randrange(3, 45) for _ in range(rng.randrange(4, 50))] for _ in range(3)]
    asked = {}
    for number in range(60):
        prompt = rng.choice(heads)[: rng.randrange(1, 60)] + [rng.randrange(3, 45)] * 3
        salt = rng.choice([None, None, "b"])
        asked[number] = submit(
            number, prompt, max_tokens=rng.randrange(1, 12), priority=rng.randrange(3),
            salt=salt,
        )  # fmt: skip
        engine.loop.handle(asked[number])
        if rng.random() < 0.3:
            for _ in range(rng.randrange(6)):
                engine.step()
        if rng.random() < 0.05:
            engine.runner.fail_next = "planted fault"
        if rng.random() < 0.15:
            engine.scheduler.abort(RequestId(rng.randrange(number + 1)))
    engine.run()
    num_done = 0
    for number, request in asked.items():
        outputs = engine.outputs.get(number)
        if outputs and outputs[-1].finish_reason is FinishReason.LENGTH:
            assert engine.tokens(number) == expected_tokens(request)
            num_done += 1
    assert num_done > 20
    stats = engine.scheduler.stats()
    assert stats.num_held_pages == stats.num_waiting == stats.num_running == 0
