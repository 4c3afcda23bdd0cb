"""The input processor: what can't be served is refused by name; the rest is numbered and seeded."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from manyroots.engine.input_processor import InputProcessor
from manyroots.errors import RequestError
from manyroots.ids import Namespace, RequestId
from manyroots.messages import EngineInfo, Submit
from manyroots.sampling import SamplingParams
from manyroots.text.tokenizer import Tokenizer
from tests.unit.text.tiny_tokenizer import tiny_tokenizer

BASE = Namespace(adapter=None, salt=None)


def info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model_path": "m", "model_name": "m", "vocab_size": 300, "max_model_len": 64,
        "page_size": 4, "num_pages": 100, "max_num_seqs": 8, "eos_token_ids": (257,),
        "dtype": "float32", "device": "cpu", "scheduling_policy": "fcfs", "max_loras": 0,
    }  # fmt: skip
    return EngineInfo(**(values | changes))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


class Asker:
    def __init__(self, tokenizer: Tokenizer, rng: random.Random | None = None, **changes: Any):
        self.input_processor = InputProcessor(info(**changes), tokenizer, rng)
        self.ids = map(RequestId, itertools.count(1))

    def ask(self, prompt: list[int], **sampling: Any) -> list[Submit]:
        return self.input_processor.submits(
            prompt,
            SamplingParams(**sampling),
            None,
            lambda: next(self.ids),
            adapter=None,
            field="prompt",
        )


@pytest.fixture
def asker(tokenizer: Tokenizer) -> Asker:
    return Asker(tokenizer)


def test_bad_words_are_forbidden_behind_a_space_too_however_many_tokens_that_is(
    asker: Asker, tokenizer: Tokenizer
) -> None:
    alone, behind = (tuple(tokenizer.encode(text, add_special_tokens=False))
                     for text in ("world", " world"))  # fmt: skip
    assert len(alone) != len(behind)
    [submit] = asker.ask([1, 2], bad_words=("world",))
    assert submit.sampling.bad_token_ids == (alone, behind)


def test_n_choices_are_n_sequences(asker: Asker) -> None:
    submits = asker.ask([1, 2], n=3, seed=7, prompt_logprobs=0)
    assert [s.request_id for s in submits] == [1, 2, 3]
    assert len({s.seed for s in submits}) == 3
    assert all(0 <= s.seed < 2**64 for s in submits)
    assert [s.sampling.prompt_logprobs for s in submits] == [0, None, None]


def test_a_seed_gives_the_same_seeds_again_and_neighbours_share_none(asker: Asker) -> None:
    seeds = {seed: [s.seed for s in asker.ask([1], n=4, seed=seed)] for seed in (-1, 0, 1, 2)}
    assert seeds[1] == [s.seed for s in asker.ask([1], n=4, seed=1)]
    assert len(set(itertools.chain(*seeds.values()))) == 16


def test_unseeded_requests_draw_from_the_given_source(tokenizer: Tokenizer) -> None:
    drawn = [Asker(tokenizer, random.Random(3)).ask([1])[0].seed for _ in range(2)]
    assert drawn[0] == drawn[1]
    system = [Asker(tokenizer).ask([1])[0].seed for _ in range(2)]
    assert system[0] != system[1]


def test_max_tokens_defaults_to_the_rest_of_the_context(tokenizer: Tokenizer) -> None:
    assert Asker(tokenizer).ask([1] * 10, max_tokens=None)[0].max_tokens == 54
    small = Asker(tokenizer, max_model_len=20)
    assert small.ask([1] * 10, max_tokens=None)[0].max_tokens == 10


def test_stop_ids_are_the_models_unless_ignored_and_the_callers(asker: Asker) -> None:
    assert asker.ask([1])[0].stop_ids == (257,)
    assert asker.ask([1], stop_token_ids=(5, 257))[0].stop_ids == (257, 5)
    assert asker.ask([1], stop_token_ids=(5,), ignore_eos=True)[0].stop_ids == (5,)


@pytest.mark.parametrize("max_tokens", [54, 55, 2**31 - 1])
def test_g04_max_tokens_beyond_the_context_are_cut_to_it(asker: Asker, max_tokens: int) -> None:
    """G04: programs send the most that any model can, and a prompt of unknown length beside it."""
    [asked] = asker.ask([1] * 10, max_tokens=max_tokens)
    assert (asked.max_tokens or asked.sampling.max_tokens) == 54
    assert asker.ask([1] * 63, max_tokens=max_tokens, min_tokens=9)[0].max_tokens == 1


def test_the_tokenizers_end_ends_what_the_configs_do_not_name(tokenizer: Tokenizer) -> None:
    """Of a model that was trained on chats and whose config.json is the base model's."""
    assert Asker(tokenizer, eos_token_ids=(7,)).ask([1])[0].stop_ids == (7, 257)
    assert Asker(tokenizer, eos_token_ids=()).ask([1])[0].stop_ids == (257,)
    assert Asker(tokenizer, eos_token_ids=(7,), vocab_size=257).ask([1])[0].stop_ids == (7,)
    assert Asker(tokenizer).ask([1], ignore_eos=True)[0].stop_ids == ()


@pytest.mark.parametrize(
    ("prompt", "sampling", "field", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([1, -1], {}, "prompt", "-1 at place 1"),
        ([300], {}, "prompt", "from 0 to 299"),
        ([1] * 64, {}, "prompt", "maximum context length is 64 tokens.* has 64"),
        ([1] * 10, {"max_tokens": None, "min_tokens": 60}, "min_tokens", "room for 54"),
        ([1, True], {}, "prompt", "True"),
        ([1, 1.5], {}, "prompt", "1.5"),
        ([1, "2"], {}, "prompt", "'2'"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias", "300"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias", "-1"),
        ([1], {"stop_token_ids": (300,)}, "stop_token_ids", "300"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    asker: Asker, prompt: list[int], sampling: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        asker.ask(prompt, **sampling)
    assert caught.value.field == field


def test_a_text_that_can_never_fit_is_refused_unread(asker: Asker) -> None:
    assert asker.input_processor.encode("hello") == [261]
    with pytest.raises(RequestError, match="1000000 characters") as caught:
        asker.input_processor.encode("x" * 10**6, field="messages")
    assert caught.value.field == "messages"
