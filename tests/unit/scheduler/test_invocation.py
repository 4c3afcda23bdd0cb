"""Where an activated adapter (aLoRA) begins to act, and whose pages that makes (N22, N23)."""

from __future__ import annotations

import random

import pytest

from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.request import NEVER, invoked_at
from tests.helpers.scheduler_harness import SchedulerHarness, expected_tokens, submit

INVOCATION = (7, 8)


def test_an_alora_acts_from_the_last_whole_occurrence_of_its_invocation_n22() -> None:
    assert invoked_at([7, 8, 1, 7, 8, 2, 7], (7, 8)) == 3
    assert invoked_at([7, 8], (7, 8)) == 0
    assert invoked_at([7, 7, 7, 1], (7, 7)) == 1
    assert invoked_at([1, 2, 9, 9], (9,)) == 3
    rng = random.Random(4)
    for _ in range(200):
        prompt, sought = rng.choices((7, 8), k=rng.randint(1, 12)), rng.choices((7, 8), k=3)
        places = [i for i in range(len(prompt)) if prompt[i : i + 3] == sought]
        assert invoked_at(prompt, tuple(sought)) == (places[-1] if places else NEVER)


def test_a_prompt_without_the_invocation_is_the_base_models_n22() -> None:
    assert invoked_at([7, 1, 8], (7, 8)) == NEVER
    assert invoked_at([8], (7, 8)) == NEVER


def with_alora(**options: int) -> tuple[SchedulerHarness, AdapterDigest]:
    """An engine whose runner notices a token computed with other weights than its own."""
    engine = SchedulerHarness(max_loras=1, **options)
    digest = AdapterDigest(b"activated")
    spec = AdapterSpec(digest, 8, 100, invocation_tokens=INVOCATION)
    engine.scheduler.load_adapter(AdapterName("a"), spec, path="a")
    return engine, digest


def ask(engine: SchedulerHarness, digest: AdapterDigest, number: int, prompt: list[int]) -> int:
    """Serve a request of the adapter, check its tokens; gives how many were cached."""
    request = submit(number, prompt, adapter="a", max_tokens=6)
    engine.loop.handle(request)
    engine.run()
    begin = invoked_at(prompt, INVOCATION)
    assert engine.tokens(number) == expected_tokens(request, digest, begin)
    return engine.last(number).num_cached_tokens


def test_n23_one_page_two_beginnings() -> None:
    """N23: a whole invocation in a page, and another that straddles its end or does not: what
    computed the page depends on the token after it."""
    page = [7, 8, 30, 7]
    straddling, whole = [*page, 8, 40, 41, 42, 43], [*page, 9, 40, 41, 42, 43]
    for first, second in ((straddling, whole), (whole, straddling)):
        engine, digest = with_alora()
        assert ask(engine, digest, 1, first) == 0
        assert ask(engine, digest, 2, second) == 0
        assert ask(engine, digest, 3, first) == ask(engine, digest, 4, second) == 8


def test_n23_at_a_pages_boundary_the_page_before_is_bases() -> None:
    """N23, N22: and the page after the boundary is the adapter's alone, as with one that begins at
    the first token of a sequence."""
    engine, digest = with_alora()
    prompt = [1, 2, 3, 4, 7, 8, 5, 6, 9]
    assert ask(engine, digest, 1, prompt) == 0
    engine.loop.handle(submit(2, prompt))
    engine.run()
    assert engine.last(2).num_cached_tokens == 4
    assert engine.tokens(2) == expected_tokens(submit(2, prompt))
    assert ask(engine, digest, 3, prompt) == 8


def test_n23_generated_invocations_count_when_they_are_sent_again() -> None:
    """N23: where the adapter begins is decided by the prompt, as PEFT does. A next turn that sends
    the output back, with an invocation in it, begins there: nothing of the first turn's adapter is
    reused, and nothing wrong."""
    engine, digest = with_alora()
    first = [1, 2, 3, 4, 7, 8, 9, 10, 7]
    ask(engine, digest, 1, first)
    answered = [*first, *engine.tokens(1)]
    ask(engine, digest, 2, [*answered, 20])
    ask(engine, digest, 3, [*first, 8, *engine.tokens(1), 21])
    ask(engine, digest, 4, [*first, 8, *engine.tokens(1), *INVOCATION, 22, 23, 24])
    assert ask(engine, digest, 5, [*first, 8, *engine.tokens(1), 22]) >= 12


def test_n22_without_an_invocation_all_pages_are_bases() -> None:
    """N22: prompt and output, in both directions, also once the adapter has gone."""
    engine, digest = with_alora()
    prompt = [7, 1, 8, 2, 3, 4, 5, 6, 7]
    ask(engine, digest, 1, prompt)
    whole = [*prompt, *engine.tokens(1)]
    for number in (2, 3):
        engine.loop.handle(submit(number, whole))
        engine.run()
        assert engine.last(number).num_cached_tokens == 12
        if number == 2:
            engine.scheduler.unload_adapter(AdapterName("a"))


@pytest.mark.parametrize("seed", range(24))
def test_n23_random_prompts_full_of_invocations_are_computed_as_if_alone(seed: int) -> None:
    """N22, N23: few tokens, so that prompts share pages whose adapter begins elsewhere; chunks,
    retractions and requests side by side. The runner reads back all that was reused."""
    rng = random.Random(seed)
    pages, size = rng.choice([(12, 4), (40, 4), (24, 3), (60, 2)])
    engine, digest = with_alora(num_pages=pages, page_size=size, budget=rng.choice([5, 9, 32]))

    def tokens(count: int) -> list[int]:
        return rng.choices((7, 7, 8, 8, 8, 1), k=count)

    stems = [tokens(16), tokens(16)]
    requests = []
    for number in range(1, 25):
        prompt = rng.choice(stems)[: rng.randint(1, 4) * size] + tokens(rng.randint(1, 3))
        name = rng.choice(("a", "a", "a", None))
        request = submit(number, prompt, adapter=name, max_tokens=rng.randint(1, 8))
        requests.append(request)
        engine.loop.handle(request)
        for _ in range(rng.randint(0, 6)):
            if engine.loop.has_work:
                engine.step()
    engine.run()
    for request in requests:
        begin = NEVER if request.adapter is None else invoked_at(request.prompt, INVOCATION)
        got = engine.tokens(int(request.request_id))
        assert got == expected_tokens(request, digest, begin), request
    assert engine.cache.stats().total_hit_tokens > 0
