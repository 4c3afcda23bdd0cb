"""Structured output, end to end with a model that would say anything (G01)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from manyroots import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from manyroots.errors import RequestError
from manyroots.sampling import ThinkingBudget
from tests.helpers.adapter_folders import write_adapter
from tests.helpers.schemas import schema
from tests.helpers.seeded import Draw
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

EOS = 257
NUM_SCHEMAS = 40
NO_SPACE = {9: -100.0, 10: -100.0, 13: -100.0, 32: -100.0}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    save_tiny(folder, "llama", vocab_size=300, eos_token_id=EOS, max_position_embeddings=1024)
    tiny_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(
        str(folder), dtype="float32", max_model_len=1024, max_num_seqs=16, enable_lora=True,
        max_lora_rank=8,
    ) as made:  # fmt: skip
        yield made


def params(wanted: StructuredOutputsParams, **more: Any) -> SamplingParams:
    values = {"temperature": 1.0, "max_tokens": 600, "logit_bias": NO_SPACE, "seed": 3} | more
    return SamplingParams(structured_outputs=wanted, **values)


def check(text: str, wanted: Any) -> None:
    checker = jsonschema.FormatChecker()
    jsonschema.Draft202012Validator(wanted, format_checker=checker).validate(json.loads(text))


def test_g01_every_finished_answer_follows_its_schema(llm: LLM) -> None:
    """G01: whatever the model would rather say, greedy or drawn, beside others and free ones."""
    wanted = [schema(Draw(seed)) for seed in range(NUM_SCHEMAS)]
    asked = [
        params(StructuredOutputsParams(json=made), temperature=float(seed % 2), seed=seed)
        for seed, made in enumerate(wanted)
    ]
    free = SamplingParams(temperature=1.0, max_tokens=40)
    results = llm.generate(["x"] * (2 * NUM_SCHEMAS), [p for pair in asked for p in (pair, free)])
    finished = 0
    for made, result in zip(wanted, results[::2], strict=True):
        [answer] = result.outputs
        if answer.finish_reason == "stop":
            finished += 1
            check(answer.text, made)
    assert finished >= 0.9 * NUM_SCHEMAS, "most come to an end"


def test_g01_what_cannot_be_honoured_is_refused_with_the_reason(llm: LLM) -> None:
    wanted = StructuredOutputsParams(json={"type": "array", "uniqueItems": True})
    with pytest.raises(RequestError, match=r"structured_outputs can't be honoured: .*uniqueItems"):
        llm.generate(["x"], params(wanted))


def test_g01_regex_choice_and_grammar(llm: LLM) -> None:
    wanted = {
        r"[a-f]{3,6}-\d+(\.5)?": StructuredOutputsParams(regex=r"^[a-f]{3,6}-\d+(\.5)?$"),
        r"yes|no|größer": StructuredOutputsParams(choice=("yes", "no", "größer")),
        r"b\d{1,3}|a": StructuredOutputsParams(
            grammar='root ::= "a" | "b" digit digit? digit?\ndigit ::= [0-9]'
        ),
        r"\((x,)*x\)": StructuredOutputsParams(grammar='start: "(" ("x" ",")* "x" ")"'),
    }
    results = llm.generate(["x"] * len(wanted), [params(made) for made in wanted.values()])
    for pattern, result in zip(wanted, results, strict=True):
        assert result.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, result.outputs[0].text)


@pytest.mark.parametrize("shape", [None, StructuredOutputsParams(regex="[a-z]+[^a-z][0-9]{4}")])
def test_g03_reasoning_is_ended_behind_its_budget(
    llm: LLM, shape: StructuredOutputsParams | None
) -> None:
    """G03: of a model that would never end it, beside a neighbour without a budget."""
    begin, end = ord("("), ord(")")
    bias = {ord("a"): 90.0, ord("b"): 80.0}
    free = SamplingParams(max_tokens=12, temperature=0, logit_bias=bias, structured_outputs=shape)
    held = dataclasses.replace(free, thinking_budget=ThinkingBudget(5, begin, end, is_begun=True))
    without, budgeted = llm.generate(["x", "x"], [free, held])
    tokens = budgeted.outputs[0].token_ids
    assert without.outputs[0].token_ids[:9] == [ord("a")] * 9
    assert tokens[:6] == [ord("a")] * 5 + [end]
    if shape is None:
        assert tokens[6:9] == [ord("a")] * 3
    else:
        assert re.fullmatch(shape.regex or "", budgeted.outputs[0].text)


def test_g01_any_object(llm: LLM) -> None:
    only = NO_SPACE | {ord("}"): 60.0, ord('"'): 50.0}
    [result] = llm.generate(
        ["x"], params(StructuredOutputsParams(json_object=True), logit_bias=only)
    )
    assert isinstance(json.loads(result.outputs[0].text), dict)


def test_g01_the_same_with_adapters_choices_logprobs_and_neighbours(
    llm: LLM, folder: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", load_tiny(folder).adapter_targets())
    wanted = params(StructuredOutputsParams(json=PERSON), n=3, logprobs=2)
    lora = LoRARequest("structured", 1, str(tmp_path / "adapter"))
    [alone] = llm.generate(["x"], wanted, lora_request=lora)
    texts = [answer.text for answer in alone.outputs]
    assert len(set(texts)) > 1
    for answer in alone.outputs:
        check(answer.text, PERSON)
        assert len(answer.logprobs) == len(answer.token_ids)
    free = SamplingParams(temperature=1.0, max_tokens=30)
    again = llm.generate(["y", "x"], [free, wanted], lora_request=[None, lora])
    assert [answer.text for answer in again[1].outputs] == texts


def test_g01_a_retracted_request_goes_on_in_its_grammar(folder: Path) -> None:
    """G01: the grammar's state follows the tokens, wherever they were computed."""
    wanted = params(
        StructuredOutputsParams(regex=r"([a-z]{4} ){25}!"), logit_bias={}, max_tokens=160
    )
    asked = [dataclasses.replace(wanted, seed=seed) for seed in range(6)]
    prompts = [f"{seed} begins" for seed in range(6)]
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6, "block_size": 4}
    with LLM(str(folder), num_gpu_blocks_override=400, **settings) as roomy:
        expected = [result.outputs[0].text for result in roomy.generate(prompts, asked)]
    with LLM(str(folder), num_gpu_blocks_override=64, **settings) as tight:
        given = [result.outputs[0].text for result in tight.generate(prompts, asked)]
        assert tight.stats().total_retractions > 0
    assert given == expected
    assert all(re.fullmatch(r"([a-z]{4} ){25}!", text) for text in given)


def test_g01_min_tokens_give_way_to_the_grammars_end(llm: LLM) -> None:
    long = StructuredOutputsParams(regex="a*")
    [result] = llm.generate(["x"], params(long, min_tokens=12, max_tokens=40))
    assert len(result.outputs[0].token_ids) >= 12
    [result] = llm.generate(["x"], params(StructuredOutputsParams(choice=("ab",)), min_tokens=12))
    assert result.outputs[0].text == "ab"
    assert result.outputs[0].finish_reason == "stop"


def test_g01_a_stop_string_ends_a_structured_text_too(llm: LLM) -> None:
    [result] = llm.generate(["x"], params(StructuredOutputsParams(regex="a{9}b"), stop=("aaa",)))
    assert result.outputs[0].text == ""
    assert result.outputs[0].stop_reason == "aaa"


def test_g01_reasoning_comes_before_the_structure(llm: LLM) -> None:
    prefix = 'prefix: reason\nreason[lazy]: /[a-z]*/ "."'
    wanted = StructuredOutputsParams(choice=("yes", "no"), prefix=prefix)
    [result] = llm.generate(["x"], params(wanted, logit_bias={ord("."): 5.0}))
    assert re.fullmatch(r"[a-z]*\.(yes|no)", result.outputs[0].text)


def test_g01_params_are_checked(llm: LLM) -> None:
    for values in ({}, {"regex": "a", "choice": ("b",)}, {"choice": ()}, {"json": 3}):
        with pytest.raises(RequestError) as caught:
            StructuredOutputsParams(**values)
        assert caught.value.field == "structured_outputs"
    with pytest.raises(RequestError, match="ignore_eos"):
        params(StructuredOutputsParams(regex="a"), ignore_eos=True)
