"""Routes that users of vLLM and SGLang know besides OpenAI's: /generate, /score, /render (G05)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from tests.unit.api.harness import Harness, error_of, events

pytestmark = pytest.mark.anyio


async def generate(harness: Harness, **body: Any) -> Any:
    response = await harness.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_g05_generate_takes_text_or_tokens_one_or_many() -> None:
    harness = Harness()
    params = {"max_new_tokens": 4, "temperature": 0}
    one = await generate(harness, text="abc", sampling_params=params)
    assert (one["text"], one["output_ids"]) == ("abca", [97, 98, 99, 97])
    meta = one["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 4)
    many = await generate(harness, input_ids=[[97, 98], [99]], sampling_params=params)
    assert [item["text"] for item in many] == ["abab", "cccc"]
    assert len({item["meta_info"]["id"] for item in many}) == 2
    choices = await generate(harness, text="a", sampling_params=params | {"n": 2})
    assert [item["text"] for item in choices] == ["aaaa", "aaaa"]
    assert harness.state.service.concurrency.num_alive == 0


async def test_g05_generate_means_the_same_sampling_as_a_completion() -> None:
    harness = Harness()
    params = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1,
        "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False,
        "sampling_seed": 3,
    }  # fmt: skip
    await generate(harness, text="ab", sampling_params=params)
    await harness.complete(
        "ab", max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
        frequency_penalty=0.2, presence_penalty=0.3, repetition_penalty=1.1, stop=["x"],
        stop_token_ids=[5], ignore_eos=True, skip_special_tokens=False, seed=3,
    )  # fmt: skip
    theirs, ours = harness.engine.submitted
    assert theirs.sampling == ours.sampling
    assert (theirs.prompt, theirs.seed) == (ours.prompt, ours.seed)
    await generate(harness, text="ab")
    assert harness.engine.submitted[-1].sampling.max_tokens == 128, "SGLang's default"


async def test_g05_generate_streams_the_text_so_far() -> None:
    response = await Harness().post(
        "/generate", {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 3}}
    )
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert [chunk["text"] for chunk in chunks] == ["a", "ab", "aba"]
    assert chunks[-1]["output_ids"] == [97, 98, 97]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, False]
    several = events(
        await Harness().post(
            "/generate",
            {"text": ["a", "b"], "stream": True, "sampling_params": {"max_new_tokens": 1}},
        )
    )
    assert {(chunk["index"], chunk["text"]) for chunk in several[:-1]} == {(0, "a"), (1, "b")}


async def test_g05_generate_gives_logprobs_of_prompt_and_output() -> None:
    body = {
        "text": "abc", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
        "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 2},
    }  # fmt: skip
    meta = (await generate(Harness(), **body))["meta_info"]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [
        [97, "a"],
        [98, "b"],
        [99, "c"],
    ]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[97, "a"], [98, "b"]]
    assert meta["input_top_logprobs"][0] is None
    assert all(len(entry) == 2 for entry in meta["output_top_logprobs"])
    later = (await generate(Harness(), **body | {"logprob_start_len": 2}))["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][2:]
    without = (await generate(Harness(), **body | {"logprob_start_len": -1}))["meta_info"]
    assert without["input_token_logprobs"] == []


async def test_g05_generate_names_adapters_by_lora_path() -> None:
    modules = tuple(LoraModule(name, f"/adapters/{name}") for name in ("sql", "law"))
    harness = Harness(lora=LoraSettings(enable_lora=True, lora_modules=modules))
    await generate(
        harness, text=["a", "b"], lora_path=["sql", None], sampling_params={"max_new_tokens": 1}
    )
    assert [submit.adapter for submit in harness.engine.submitted] == ["sql", None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": [300]}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "lora_path": "nobody"}, "lora_path"),
    ],
)
async def test_g05_generate_refuses_by_the_callers_names(body: dict[str, Any], param: str) -> None:
    response = await Harness().post("/generate", body)
    assert response.status_code in (400, 404)
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_g05_the_score_of_two_texts_is_the_cosine_of_their_vectors(path: str) -> None:
    """One beside all, or as many. The fake engine's vectors are all the same, so the cosine is 1;
    tests/e2e has it of a real model."""
    body = {"model": "tiny", "text_1": "ab", "text_2": ["a", "abc"]}
    answer = (await Harness().post(path, body)).json()
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert [item["score"] for item in answer["data"]] == pytest.approx([1.0, 1.0])
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    pairs = {"model": "tiny", "queries": ["a", "b"], "documents": ["c", "d"]}
    assert len((await Harness().post(path, pairs)).json()["data"]) == 2


async def test_g05_label_scores_are_probabilities_of_tokens() -> None:
    body = {"query": "ab", "items": ["c", "de"], "label_token_ids": [97, 98]}
    harness = Harness()
    answer = (await harness.post("/v1/score", body)).json()
    assert [list(submit.prompt)[-1] for submit in harness.engine.submitted] == [97, 98, 97, 98]
    assert [bytes(submit.prompt[:-1]) for submit in harness.engine.submitted] == [
        b"abc", b"abc", b"abde", b"abde",
    ]  # fmt: skip
    assert all(0 < value <= 1 for row in answer["scores"] for value in row)
    shares = (await Harness().post("/v1/score", body | {"apply_softmax": True})).json()["scores"]
    assert [math.fsum(row) for row in shares] == pytest.approx([1.0, 1.0])
    first = Harness()
    ids = {"query": [97], "items": [[98]], "label_token_ids": [1], "item_first": True}
    await first.post("/v1/score", ids)
    assert list(first.engine.submitted[0].prompt) == [98, 97, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "text_2": ""}, "text_2"),
        ({"query": "a", "items": ["b"], "label_token_ids": [300]}, "label_token_ids"),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ({"text_1": "a", "text_2": "b", "instruction": "rank"}, "instruction"),
    ],
)
async def test_g05_scores_that_can_not_be_had(body: dict[str, Any], param: str) -> None:
    response = await Harness().post("/score", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_g05_a_rendered_request_is_the_one_that_is_computed() -> None:
    harness = Harness()
    fields = {"max_tokens": 5000, "temperature": 0.5, "seed": 4, "stop": "x"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    shown = (await harness.post("/v1/chat/completions/render", chat)).json()
    assert harness.engine.submitted == []
    assert harness.state.service.concurrency.num_alive == 0
    await harness.post("/v1/chat/completions", chat)
    [submit] = harness.engine.submitted
    assert shown["token_ids"] == list(submit.prompt)
    assert "hi" in shown["text"]
    assert shown["sampling_params"]["max_tokens"] == 512 - len(submit.prompt)
    assert shown["sampling_params"]["temperature"] == 0.5
    texts = {"model": "tiny", "prompt": ["ab", [1, 2]], **fields}
    several = (await harness.post("/v1/completions/render", texts)).json()
    assert [item["token_ids"] for item in several] == [[97, 98], [1, 2]]
    assert several[0]["text"] == "ab"
    refused = await harness.post("/v1/chat/completions/render", chat | {"temperature": -1})
    assert error_of(refused)["param"] == "temperature"
