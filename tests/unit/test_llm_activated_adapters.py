"""Activated adapters (aLoRA) in Python: what the cache answers is what was never cached (N22, N23).

Prompts full of invocations, whole, repeated and across the ends of pages, through two real engines
around a tiny model: one that reuses pages and one that computes everything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.scheduler.request import NEVER, invoked_at
from tests.helpers.adapter_folders import Recipe
from tests.helpers.tiny_adapters import ATTENTION, TinyAdapters

PAGE = 4
INVOCATION = (7, 8)
RECIPE = Recipe(rank=8, modules=ATTENTION, seed=9, scale=0.5, invocation_tokens=INVOCATION)
NUM_SEEDS = 6
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyAdapters:
    tiny = TinyAdapters(tmp_path_factory.mktemp("tiny"))
    tiny.write("activated", RECIPE)
    return tiny


def start(tiny: TinyAdapters, *, reuse: bool) -> LLM:
    return LLM(
        str(tiny.model), enable_lora=True, dtype="float32", block_size=PAGE, max_num_seqs=4,
        num_gpu_blocks_override=256, max_num_batched_tokens=24, enable_prefix_caching=reuse,
    )  # fmt: skip


@pytest.fixture(scope="module")
def warm(tiny: TinyAdapters) -> Iterator[LLM]:
    with start(tiny, reuse=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def cold(tiny: TinyAdapters) -> Iterator[LLM]:
    with start(tiny, reuse=False) as llm:
        yield llm


def ask(
    llm: LLM, tiny: TinyAdapters, prompts: list[list[int]], names: list[str | None]
) -> list[list[int]]:
    requests = [None if name is None else LoRARequest(name, 1, tiny.path(name)) for name in names]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    results = llm.generate(prompts, greedy, lora_request=requests)
    return [result.outputs[0].token_ids for result in results]


def test_n23_one_page_two_beginnings(tiny: TinyAdapters, warm: LLM, cold: LLM) -> None:
    """N23: the same page, with an adapter that begins at its first token or at its last, depending
    on the token after it; and what PEFT says of both."""
    page = [*INVOCATION, 60, 7]
    prompts = [[*page, 8, 40, 41, 42, 43], [*page, 9, 40, 41, 42, 43]]
    assert [invoked_at(prompt, INVOCATION) for prompt in prompts] == [3, 0]
    wanted = [tiny.greedy(prompt, "activated", 6) for prompt in prompts]
    for prompt, tokens in zip(prompts, wanted, strict=True):
        for llm in (cold, warm, warm):
            assert ask(llm, tiny, [prompt], ["activated"]) == [tokens]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_n23_cached_tokens_are_cold_tokens(
    tiny: TinyAdapters, warm: LLM, cold: LLM, seed: int
) -> None:
    """N22, N23: prompts that share pages, some of base, several at once, each with a second turn
    that sends the output back, with or without an invocation after it."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices((7, 7, 8, 8, 8, 60 + seed), k=count)

    stems = [tokens(16), tokens(16)]
    names = rng.choices(("activated", "activated", "activated", None), k=NUM_PROMPTS)
    prompts = [
        rng.choice(stems)[: rng.randint(1, 4) * PAGE] + tokens(rng.randint(1, 3)) for _ in names
    ]
    before = warm.stats().total_hit_tokens
    expected = ask(cold, tiny, prompts, names)
    got = [one for i in range(0, NUM_PROMPTS, 3) for one in
           ask(warm, tiny, prompts[i : i + 3], names[i : i + 3])]  # fmt: skip
    assert got == expected
    assert warm.stats().total_hit_tokens > before
    turns = [
        [*prompt, *output, *rng.choice(((), INVOCATION, (8,))), 61]
        for prompt, output in zip(prompts, expected, strict=True)
    ]
    assert ask(warm, tiny, turns, names) == ask(cold, tiny, turns, names)


def test_the_prompts_are_as_rough_as_they_should_be() -> None:
    """Or the test above would show little: pages with the same tokens whose adapter begins
    elsewhere, and prompts that are base's to their end."""
    begins: dict[tuple[int, ...], set[int]] = {}
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        stem = rng.choices((7, 7, 8, 8, 8, 60 + seed), k=8)
        for tail in ([8], [9], [7, 8], [1, 7, 8]):
            begin = invoked_at([*stem, *tail], INVOCATION)
            begins.setdefault(tuple(stem[4:]), set()).add(begin)
    assert sum(len(each) > 1 for each in begins.values()) > NUM_SEEDS // 2
    assert any(begin == NEVER for each in begins.values() for begin in each)
