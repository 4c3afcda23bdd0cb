"""Drafts through the real engine: a request has the same answer with and without (V01 to V05)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.bench.recorded_drafts import RecordedDrafts
from manyroots.sampling import ThinkingBudget
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.adapter_folders import write_adapter
from tests.soaks.differential import ADAPTERS, ALL_MIXES, PAGE
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

VOCAB, LENGTH = 300, 16
SAME_FAMILIES = {
    "latents and groups", "latents and few groups", "latents and dense blocks",
    "latents and sigmoids", "delta nets and experts", "delta nets, other experts",
}  # fmt: skip
"""Mixes that route to experts in another way than others with the same families of layers; they are
in `tests/property/test_differential.py`."""
ALL_RIGHT = ("full and window", "delta nets", "compressed groups")
"""Mixes that are also tried with guesses all of which are right."""
CONFIG = {"method": "suffix", "num_speculative_tokens": 5, "adaptive": False}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

THINKING = ThinkingBudget(7, begin=1, end=ord("x"), is_begun=True)
"""Reasoning that is cut within a draft."""
THOUGHT = 'prefix: thought\nthought[lazy]: /[a-w ]*/ "x"'


def sampling(**asked: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "seed": 5, **asked})


KINDS = {
    "greedy": sampling(ignore_eos=True),
    "drawn": sampling(temperature=1.0, top_p=0.9, top_k=40, ignore_eos=True, logprobs=3),
    "min p": sampling(temperature=1.3, min_p=0.05),
    "penalties": sampling(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.2),
    "biased": sampling(logit_bias={9: 4.0, 11: 3.5}, temperature=0.7),
    "stops late": sampling(stop_token_ids=list(range(20, 120)), min_tokens=9, temperature=0.9),
    "stop string": sampling(stop=["e", "st"], include_stop_str_in_output=True, temperature=0.8),
    "few tokens": sampling(allowed_token_ids=[5, 6, 7, 8, 9], temperature=1.0),
    "bad words": sampling(bad_words=["a", "th"], temperature=0.6),
    "choice": sampling(structured_outputs=StructuredOutputsParams(choice=("hello world", "stop"))),
    "regex": sampling(
        structured_outputs=StructuredOutputsParams(regex="[a-f]{3,9}(stop)?"), temperature=0.9
    ),
    "schema": sampling(
        structured_outputs=StructuredOutputsParams(json=SCHEMA), temperature=1.0, logprobs=0
    ),
    "many logprobs": sampling(logprobs=20, ignore_eos=True),
    "thinking": sampling(thinking_budget=THINKING, temperature=0.8, ignore_eos=True),
    "thinking, then a choice": sampling(
        thinking_budget=THINKING,
        structured_outputs=StructuredOutputsParams(choice=("hello", "stop"), prefix=THOUGHT),
        temperature=0.8,
    ),
    "thinking, then a call": sampling(
        thinking_budget=THINKING,
        structured_outputs=StructuredOutputsParams(
            grammar='start: "<c>" /[a-c]{2,4}/ "</c>"', prefix=THOUGHT
        ),
        temperature=0.8,
    ),
}


class Engines:
    """One without drafts, and one whose drafts are right as often as asked."""

    def __init__(self, folder: Path, mix: str) -> None:
        self.mix = mix
        kind, changes = ALL_MIXES[mix]
        save_tiny(folder / "model", kind, vocab_size=VOCAB, **changes)
        tiny_backend().save(str(folder / "model" / "tokenizer.json"))
        decoder = load_tiny(folder / "model")
        self.adapters: list[LoRARequest | None] = [None]
        for number, (name, recipe) in enumerate(ADAPTERS.items(), 1):
            write_adapter(folder / name, decoder.adapter_targets(), recipe)
            self.adapters.append(LoRARequest(name, number, str(folder / name)))
        self.plain = self._start(folder)
        self.drafting = self._start(folder, speculative_config=CONFIG)

    def _start(self, folder: Path, **settings: Any) -> LLM:
        return LLM(
            str(folder / "model"), dtype="float32", enable_lora=True, max_loras=4,
            block_size=PAGE, max_model_len=160, max_num_batched_tokens=64, max_num_seqs=12,
            kv_cache_memory_bytes=32 << 20, **settings,
        )  # fmt: skip

    def draft(self, acceptance: float, requests: list[Any], answers: list[Any]) -> None:
        """Have the second engine guess these answers."""
        speculation = self.drafting._engine._scheduler.speculation  # type: ignore[union-attr]
        assert speculation is not None
        source = RecordedDrafts(acceptance, vocab_size=VOCAB)
        for (prompt, _, _), answer in zip(requests, answers, strict=True):
            source.record(prompt, answer.outputs[0].token_ids)
        speculation.source = source

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()


@pytest.fixture(scope="module", params=[mix for mix in ALL_MIXES if mix not in SAME_FAMILIES])
def engines(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("speculation"), request.param)
    yield made
    made.close()


def asked(engines: Engines, seed: int) -> list[Any]:
    """Every kind of sampling, over the base model and the adapters."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(5, 23))] for _ in KINDS]
    return [
        (prompt, one, engines.adapters[(place + seed) % len(engines.adapters)])
        for place, (prompt, one) in enumerate(zip(prompts, KINDS.values(), strict=True))
    ]


def answered(llm: LLM, requests: list[Any]) -> list[Any]:
    prompts, samplings, adapters = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(samplings), lora_request=list(adapters))


def told(answers: list[Any]) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason)
        for answer in answers
        for one in answer.outputs
    ]


def scores(answers: list[Any]) -> list[float]:
    """Log-probabilities of all tokens that have any."""
    return [
        entry.logprob
        for answer in answers
        for position in answer.outputs[0].logprobs or ()
        for entry in position.values()
    ]


def test_v01_answers_are_the_same_with_drafts_of_every_kind(engines: Engines) -> None:
    """V01, V03, V04, V05, P11: over every mix of families, several adapters in one batch, and every
    kind of sampling, with right and with wrong guesses."""
    requests = asked(engines, seed=3)
    load = sampling(max_tokens=1)
    answered(engines.drafting, [([5, 6, 7], load, adapter) for adapter in engines.adapters])
    wanted = answered(engines.plain, requests)
    for acceptance in (0.6, 1.0) if engines.mix in ALL_RIGHT else (0.6,):
        compare(engines, acceptance, requests, wanted)


def compare(engines: Engines, acceptance: float, requests: list[Any], wanted: list[Any]) -> None:
    engines.draft(acceptance, requests, wanted)
    before = engines.drafting.stats().speculation
    got = answered(engines.drafting, requests)
    after = engines.drafting.stats().speculation
    for name, one, other in zip(KINDS, told(wanted), told(got), strict=True):
        assert one == other, name
    assert scores(got) == pytest.approx(scores(wanted), abs=1e-4)
    assert before is not None
    assert after is not None
    num_drafted = after.total_draft_tokens - before.total_draft_tokens
    num_accepted = after.total_accepted_tokens - before.total_accepted_tokens
    assert num_drafted > 50
    if acceptance == 1.0:
        assert num_accepted == num_drafted
    else:
        assert 0 < num_accepted < num_drafted
    assert engines.drafting.stats().num_held_pages == 0
