"""Random traffic through scheduler, cache and fake runner, audited after every step."""

from __future__ import annotations

import random

import pytest

from manyroots.ids import RequestId
from manyroots.messages import Abort, FinishReason
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit
from tests.helpers.seeded import seeds


@pytest.mark.parametrize("seed", seeds(20))
def test_random_traffic_gives_each_request_its_own_tokens(seed: int) -> None:
    """R01, H10, C02: random prompts, aborts and step failures; counts balance after every step,
    no step computes more than its budget, and a failing seed replays exactly."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    longest = 40
    engine = SchedulerHarness(
        num_pages=rng.randint(longest // page_size + 2, 120),
        page_size=page_size,
        max_num_seqs=rng.randint(1, 6),
        budget=rng.choice([6, 8, 17, 64]),
        chunk=rng.choice([None, 1, 3, 8]),
        depth=rng.choice([0, 1]),
        reuse=rng.random() < 0.85,
    )
    heads = [[rng.randrange(50) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    submitted, aborted, faults = {}, set(), rng.random() < 0.3
    failed_steps = 0
    for number in range(30):
        prompt = rng.choice(heads) + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        request = submit(
            number,
            prompt[: longest - 16],
            max_tokens=rng.randint(1, 16),
            min_tokens=rng.choice([0, 0, 1]),
            stop_ids=tuple(rng.sample(range(50), 3)),
            salt=rng.choice([None, "a"]),
        )
        submitted[number] = request
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            victim = rng.randrange(number + 1)
            aborted.add(victim)
            engine.loop.handle(Abort([RequestId(victim)]))
        if faults and rng.random() < 0.05:
            engine.runner.fail_next = "planted"
            failed_steps += 1
    engine.run()
    for number, request in submitted.items():
        last = engine.last(number)
        want, got = expected_tokens(request), engine.tokens(number)
        if last.finish_reason is FinishReason.ABORT:
            assert number in aborted
            assert got == want[: len(got)]
        elif last.finish_reason is FinishReason.ERROR:
            assert failed_steps > 0
            assert got == want[: len(got)]
        else:
            assert got == want
    for plane in engine.cache.stats().planes:
        assert plane.num_held == 0
        assert plane.num_free + plane.num_cached == plane.num_units
