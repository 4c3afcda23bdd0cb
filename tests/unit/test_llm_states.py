"""Models with recurrent layers, served: what the cache gives is exact, and what others lost hits.

Through the real engine, with real bytes; `python -m tests.soaks.differential --mix convolutions` is
the long form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, SamplingParams
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    save_tiny(folder, "lfm2", vocab_size=300, max_position_embeddings=4096)
    tiny_backend().save(str(folder / "tokenizer.json"))
    return folder


def serve(folder: Path, **settings: Any) -> LLM:
    given = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4}
    return LLM(str(folder), dtype="float32", block_size=PAGE, **{**given, **settings})


@pytest.fixture
def cold(folder: Path) -> Iterator[LLM]:
    with serve(folder, enable_prefix_caching=False) as llm:
        yield llm


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(count)]


def said(answer: Any) -> list[int]:
    tokens: list[int] = answer.outputs[0].token_ids
    return tokens


@pytest.mark.parametrize("length", [150, 160])
def test_h12_a_shared_head_of_any_length_is_reused_from_the_third_request_on(
    folder: Path, cold: LLM, length: int
) -> None:
    """H12, vLLM #45238: 1500 shared tokens found nothing where 1600 did; here all whole pages of
    either, and what is computed from there is what a cold engine computes."""
    rng = random.Random(length)
    head = text(rng, length)
    with serve(folder) as llm:
        for number in range(4):
            prompt = head + text(rng, 37)
            [answer] = llm.generate([prompt], GREEDY)
            assert said(answer) == said(cold.generate([prompt], GREEDY)[0])
            assert answer.num_cached_tokens == (length // PAGE * PAGE if number > 1 else 0)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3.5", "granite-h", "falcon-h1"])
def test_p12_eight_requests_that_come_together_share_their_system_prompt(
    kind: str, tmp_path: Path
) -> None:
    """P12: it is computed once, on every kind of recurrent layer; tokens are those of a cold
    engine. Before, all eight computed it."""
    save_tiny(tmp_path, kind, vocab_size=300, max_position_embeddings=4096)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    rng = random.Random(5)
    system = text(rng, 8 * PAGE + 3)
    prompts = [system + text(rng, rng.randint(50, 70)) for _ in range(8)]
    with serve(tmp_path, max_num_seqs=8, kv_cache_memory_bytes=64 << 20) as llm:
        answers = llm.generate(prompts, GREEDY)
        assert [answer.num_cached_tokens for answer in answers] == [0] + [8 * PAGE] * 7
        num_computed = llm.stats().total_step_tokens
        assert num_computed == sum(map(len, prompts)) - 7 * 8 * PAGE + 8 * (GREEDY.max_tokens - 1)
        assert llm.stats().num_held_pages == 0
    with serve(tmp_path, enable_prefix_caching=False) as cold:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert said(answer) == said(cold.generate([prompt], GREEDY)[0])


def test_h12_a_state_larger_than_the_context_leaves_pages_as_small_as_they_are(
    folder: Path,
) -> None:
    """H12, vLLM #48402: blocks grew to the size of a state, and a context shorter than one never
    had a hit. Here a prompt that is asked again is found, up to its last token's page."""
    rng = random.Random(1)
    with serve(folder, max_model_len=48, checkpoint_interval_tokens=4096) as llm:
        prompt = text(rng, 35)
        first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert said(first) == said(second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)


def test_f05_states_saved_in_steps_of_mixed_chunks_are_exact(folder: Path, cold: LLM) -> None:
    """F05, C05, SGLang #39342: prompts whose chunks share steps with others' and with decodes saved
    wrong states. Every prompt continues here from what such steps saved."""
    rng = random.Random(2)
    prompts = [text(rng, count) for count in (90, 33, 61, 47, 128, 16, 17, 75)]
    with serve(folder, max_num_batched_tokens=40, checkpoint_interval_tokens=PAGE) as llm:
        llm.generate(prompts, GREEDY)
        longer = [prompt + text(rng, 3) for prompt in prompts]
        answers = llm.generate(longer, GREEDY)
    for prompt, answer in zip(longer, answers, strict=True):
        assert answer.num_cached_tokens >= (len(prompt) - 4) // PAGE * PAGE
        [alone] = cold.generate([prompt], GREEDY)
        assert said(answer) == said(alone)


def test_h12_ten_turns_of_chats_find_nearly_all_that_an_endless_cache_would_have(
    folder: Path,
) -> None:
    """H05, H12: ten turns, a shared system prompt and odd lengths: at least 0.98 of it."""
    rng = random.Random(3)
    system = text(rng, 101)
    chats = [list(system) for _ in range(4)]
    known: list[list[int]] = []
    found = best = 0
    with serve(folder, max_model_len=1024) as llm:
        for _ in range(10):
            for index, chat in enumerate(chats):
                prompt = chat + text(rng, rng.randint(11, 61))
                [answer] = llm.generate([prompt], GREEDY)
                found += answer.num_cached_tokens
                best += max((_reusable(prompt, old) for old in known), default=0)
                chats[index] = prompt + said(answer)
                known.append(chats[index][:-1])  # the last token was never computed
    assert found >= 0.98 * best, f"{found} of {best} tokens"


def _reusable(prompt: list[int], old: list[int]) -> int:
    same = 0
    for one, other in zip(prompt[:-1], old, strict=False):
        if one != other:
            break
        same += 1
    return same // PAGE * PAGE


def test_s07_every_response_says_why_no_more_was_reused(folder: Path) -> None:
    """S07: cold, no checkpoint where prompts part, nothing more to reuse, another namespace."""
    rng = random.Random(4)
    head = text(rng, 60)
    prompts = [head + text(rng, 20) for _ in range(2)]
    with serve(folder) as llm:
        answers = [llm.generate([prompt], GREEDY)[0] for prompt in [*prompts, prompts[1]]]
        assert [answer.cache_use.limit for answer in answers] == ["cold", "checkpoint", "nothing"]
        missed = llm.stats().missed_tokens
        assert missed == {"cold": 64, "checkpoint": 64}


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("lfm2", (26, 28, 29, 31, 44)),
        ("qwen3.5", (28, 31)),
        ("granite-h", (29, 44)),
        ("falcon-h1", (26, 28)),
    ],
)
def test_h05_a_stop_string_leaves_the_next_turn_as_much_as_an_end_by_length(
    kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """H05: three tokens are a stop string, found when they and more are computed. Wherever in a
    page they stand, the next turn finds all whole pages before them, and gives cold tokens."""
    save_tiny(tmp_path, kind, vocab_size=300)
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    letters = {
        "temperature": 1, "seed": 5, "ignore_eos": True,
        "allowed_token_ids": list(range(97, 123)),
    }  # fmt: skip
    prompt = text(random.Random(5), 35)
    with serve(tmp_path) as llm:
        [whole] = llm.generate([prompt], SamplingParams(max_tokens=60, **letters))
        tokens, spelled = said(whole), whole.outputs[0].text
        assert len(tokens) == len(spelled) == 60
        for length in lengths:
            stop = spelled[length : length + 3]
            assert spelled.index(stop) == length
            talk = [*prompt, *tokens[:length], *text(random.Random(length), 9)]
            llm.reset_prefix_cache()
            [cold] = llm.generate([talk], GREEDY)
            llm.reset_prefix_cache()
            stopping = SamplingParams(max_tokens=60, stop=[stop], **letters)
            [answer] = llm.generate([prompt], stopping)
            assert answer.outputs[0].text == spelled[:length]
            [again] = llm.generate([talk], GREEDY)
            assert again.num_cached_tokens == (len(prompt) + length) // PAGE * PAGE
            assert said(again) == said(cold)


def test_h05_h12_an_answer_that_ends_by_a_stop_token_keeps_its_state(
    folder: Path, cold: LLM
) -> None:
    """H05, H12: the next turn finds all whole pages of the prompt and the answer, as after an end
    by length, and says what a cold engine says."""
    rng = random.Random(7)
    prompt = text(rng, 37)
    whole = said(cold.generate([prompt], replace(GREEDY, max_tokens=60))[0])
    ends = [n for n in range(30, 60) if whole[n - 1] not in whole[: n - 1]]
    assert ends, "every token comes twice"
    end = ends[0]
    stopped = replace(GREEDY, max_tokens=60, stop_token_ids=[whole[end - 1]])
    with serve(folder) as llm:
        [answer] = llm.generate([prompt], stopped)
        assert answer.outputs[0].finish_reason == "stop"
        assert said(answer) == whole[:end]
        longer = prompt + whole[:end] + text(rng, 5)
        [after] = llm.generate([longer], GREEDY)
        assert after.num_cached_tokens == (len(prompt) + end - 1) // PAGE * PAGE
        assert said(after) == said(cold.generate([longer], GREEDY)[0])
