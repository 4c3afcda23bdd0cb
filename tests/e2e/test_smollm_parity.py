"""SmolLM2-135M-Instruct, real weights, float32: our greedy tokens are transformers' own.

In a batch, alone, among others that sample, with and without prefix reuse, in small chunks and
after retractions. transformers is asked once, about the batch; the rest is held against that, with
fewer prompts where it is not the number of them that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manyroots import LLM, SamplingParams
from manyroots.scheduler.admission import Admission
from tests.e2e.prompts import PROMPTS
from tests.e2e.theirs import default_model

NUM_NEW_TOKENS = 12
TEXTS = PROMPTS[::3]
"""A third of the fifty: every kind and every shared beginning is among them."""
FIFTH = slice(4, None, 5)
FEW = slice(9, 14)
"""Every fifth prompt, and five of them: long and short ones are in both."""
LONG = slice(10, 15)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.fixture(scope="module")
def cold(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Our tokens, all prompts in one batch, none of them seen before."""
    return run(llm, prompts, salt="batch")


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], cold: list[list[int]]) -> list[list[int]]:
    """transformers' choice at each place, given what we chose before it: one pass instead of one
    for each token. Where all of them are ours, they are its greedy tokens from the first on. Each
    prompt alone: no padding, no batch."""
    model = default_model()
    tokens = []
    for prompt, answer in zip(prompts, cold, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits
        tokens.append(logits[0].argmax(-1).tolist())
    return tokens


def run(engine: LLM, prompts: list[list[int]], salt: str | None = None) -> list[list[int]]:
    results = engine.generate(prompts, GREEDY, cache_salt=salt)
    return [result.outputs[0].token_ids for result in results]


def assert_same(actual: list[list[int]], expected: list[list[int]]) -> None:
    wrong = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
    assert not wrong, f"prompts {wrong} differ; first: {actual[wrong[0]]} {expected[wrong[0]]}"


def engine(**settings: Any) -> LLM:
    return LLM(dtype="float32", **settings)


def test_h13_cold_and_cached_batches(
    llm: LLM, prompts: list[list[int]], cold: list[list[int]], expected: list[list[int]]
) -> None:
    """H13: a cold batch, then the same batch from the cache."""
    assert all(len(tokens) == NUM_NEW_TOKENS for tokens in cold)
    assert_same(cold, expected)
    hits = llm.stats().total_hit_tokens
    assert_same(run(llm, prompts, salt="batch"), expected)
    reusable = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert llm.stats().total_hit_tokens - hits == reusable
    assert llm.stats().num_held_pages == 0


def test_each_prompt_alone(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    alone = [run(llm, [prompt], salt="alone")[0] for prompt in prompts[FEW]]
    assert_same(alone, expected[FEW])


def test_a_mixed_batch_with_sampling_neighbours(
    llm: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Greedy rows are not touched by rows that sample, penalise, bias or ask for logprobs."""
    others = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40),
        SamplingParams(temperature=0.8, top_k=50, frequency_penalty=0.5, max_tokens=7),
        SamplingParams(temperature=0, logit_bias={5: 10.0}, logprobs=3, max_tokens=12),
        SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=3),
    ]
    some = prompts[FIFTH]
    doubled = [prompt for prompt in some for _ in range(2)]
    params = [GREEDY if i % 2 == 0 else others[i // 2 % 4] for i in range(len(doubled))]
    results = llm.generate(doubled, params, cache_salt="mixed")
    assert_same([result.outputs[0].token_ids for result in results[::2]], expected[FIFTH])


def test_without_prefix_reuse(prompts: list[list[int]], expected: list[list[int]]) -> None:
    with engine(enable_prefix_caching=False, max_num_seqs=64) as llm:
        assert_same(run(llm, prompts[FIFTH]), expected[FIFTH])
        assert llm.stats().total_hit_tokens == 0


def test_in_small_chunks(prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Chunks of 7 tokens, which end within pages. Tiny models have chunks of every size."""
    some = prompts[FEW]
    assert sum(len(prompt) > 7 for prompt in some) >= 2
    with engine(long_prefill_token_threshold=7, max_num_seqs=64) as llm:
        assert_same(run(llm, some), expected[FEW])


def _fits_alone(admission: Any, request: Any, lease: Any) -> bool:
    """Whether a request's prompt and a page fit, whatever the others will need."""
    cache = admission._cache
    enough = min(request.num_tokens + cache.page_size, admission._max_model_len)
    most = admission._placer.most_step_tokens
    return bool(cache.can_reach(lease, lease.num_cached_tokens, enough, most))


def test_n07_after_forced_retraction(
    prompts: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """N07: a cache too small for the batch retracts requests, and no request's tokens change. The
    test starts more requests than fit, which the scheduler otherwise prevents."""
    monkeypatch.setattr(Admission, "_could_go_on", _fits_alone)
    with engine(num_gpu_blocks_override=17, max_num_seqs=16, max_model_len=256) as llm:
        assert_same(run(llm, prompts[LONG]), expected[LONG])
        assert llm.stats().total_retractions > 0
        assert llm.stats().num_held_pages == 0


def test_seeded_sampling_does_not_depend_on_the_batch(llm: LLM, prompts: list[list[int]]) -> None:
    """S01: the same seed gives the same tokens alone and in a batch; n choices differ."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=11, n=3, max_tokens=8)
    [alone] = llm.generate([prompts[0]], params)
    together = llm.generate(prompts[:4], params)[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in together.outputs]
    assert len({tuple(o.token_ids) for o in alone.outputs}) == 3


def test_p02_n_choices_share_the_prompts_pages(llm: LLM, prompts: list[list[int]]) -> None:
    """P02: n completions of one prompt compute its full pages once."""
    prompt = prompts[11]
    before = llm.stats()
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=2)
    llm.generate([prompt], params, cache_salt="choices")
    reused = llm.stats().total_hit_tokens - before.total_hit_tokens
    assert reused == 3 * ((len(prompt) - 1) // 16 * 16)
