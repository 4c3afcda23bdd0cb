"""A burst begins as many as can go on, and no fewer."""

from __future__ import annotations

import random

import pytest

from tests.helpers.scheduler_harness import expected_tokens, submit
from tests.unit.peers.plans import Stepping


def burst(num_pages: int = 64, **settings: int) -> Stepping:
    options = {"page_size": 16, "num_pages": num_pages, "budget": 8192, "max_num_seqs": 64}
    return Stepping(**(options | settings))


def test_no_more_begin_than_can_have_their_next_page() -> None:
    """48 tokens are three pages, and all want a fourth at once: 16 of them have it, where 21 began
    and 5 were retracted within three steps."""
    engine = burst()
    engine.take(*(submit(i, [i + 1] * 48, max_tokens=200) for i in range(30)))
    assert len(engine.one()) == 16
    for _ in range(15):
        engine.one()
    assert engine.scheduler.stats().total_retractions == 0


def test_those_that_end_in_the_page_they_have_hold_up_nobody() -> None:
    engine = burst()
    engine.take(*(submit(i, [i % 50, *[7] * 39], max_tokens=8) for i in range(30)))
    assert len(engine.one()) == 21
    engine.all()
    assert engine.scheduler.stats().total_retractions == 0


def test_prompts_under_way_keep_the_pages_they_will_need() -> None:
    """Chunk by chunk, too: what begins beside a long prompt leaves it its rest."""
    engine = burst(num_pages=32, budget=32)
    engine.take(submit(0, list(range(50)) * 8, max_tokens=4))
    engine.one()
    engine.take(*(submit(i, [i] * 20, max_tokens=40) for i in range(1, 12)))
    engine.all()
    assert engine.scheduler.stats().total_retractions <= 2
    assert engine.began()[0] == 0
    assert engine.began().count(0) == 1, "the long prompt was computed once"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_all_end_with_their_own_tokens_under_bursts(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = burst(num_pages=1024 // page_size, page_size=page_size, budget=256)
    requests = [
        submit(
            i, [rng.randrange(50) for _ in range(rng.randint(1, 90))], max_tokens=rng.randint(1, 90)
        )
        for i in range(40)
    ]
    engine.take(*requests)
    engine.all()
    for request in requests:
        assert engine.tokens(request.request_id) == expected_tokens(request)
