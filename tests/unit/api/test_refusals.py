"""Bad requests: a 4xx that names the field, in OpenAI's envelope (R03)."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import httpx
import pytest

from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio

PROMPT = {"model": "tiny", "prompt": "ab"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "a" * 512}, "prompt"),
        ({"prompt": "a" * 10**6}, "prompt"),
        ({"prompt": ["a"] * 10_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 100, "prompt": ["a"] * 3}, "n"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"true": 1}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 2**20}, "cache_salt"),
        ({"cache_salt": "../../etc"}, "cache_salt"),
        ({"cache_salt": "a\x00b"}, "cache_salt"),
        ({"cache_salt": "a\nb"}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 5}, "best_of"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "x" * 2**20 + "x"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_grammar": "what"}, "guided_grammar"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"type": "object", "not": {}}}, "guided_json"),
        ({"guided_json": {"type": "wizard"}}, "guided_json"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/schema"}}, "guided_json"),
        ({"guided_json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "guided_json"),
        ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
async def test_a_bad_completion_names_its_field(fields: dict[str, Any], param: str) -> None:
    harness = Harness()
    start = time.process_time()
    response = await harness.post("/v1/completions", PROMPT | fields)
    assert time.process_time() - start < 1
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == param
    assert param in error["message"]
    assert harness.state.service.concurrency.num_alive == 0
    assert not harness.engine.submitted


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHOICE = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"nope": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": "x"}, "tools"),
        ({"tools": [TOOL] * 2000}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "strict": 3}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": CHOICE}, "tool_choice"),
        ({"tool_choice": CHOICE, "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
async def test_a_bad_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    response = await Harness().post("/v1/chat/completions", CHAT | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert param in error["message"]


async def test_fields_that_ask_for_nothing_are_accepted() -> None:
    fields: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "tools": [], "tool_choice": "none", "max_tokens": 1,
        "response_format": {"type": "text"}, "modalities": ["text"], "audio": None,
        "stop": None, "temperature": None, "safety_identifier": "x", "prompt_cache_key": "k",
    }  # fmt: skip
    assert (await Harness().chat(**fields)).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"model": "tiny", "prompt": "ab', "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"{} {}", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"prompt": "a", "prompt": "b", "model": "tiny"}', "'prompt' is given twice"),
        (b'{"model": "tiny", "prompt": "a\\ud800"}', "prompt holds the lone surrogate"),
        (b'{"model": "tiny", "prompt": ["a", "\\udc00"]}', "prompt[1] holds the lone surrogate"),
        (b'{"model": "tiny", "\\ud800": 1}', "lone surrogate"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "given twice"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature is NaN"),
        (b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}', "top_p is -Infinity"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature is inf"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias.5 is NaN"),
        (b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}", "too long a number"),
        (b'{"prompt": "a"}', "model is missing"),
    ],
)
async def test_a_bad_body_says_what_is_wrong(body: bytes, says: str) -> None:
    headers = {"content-type": "application/json"}
    async with Harness().client as client:
        response = await client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert says in error_of(response)["message"]


async def test_nan_inside_a_text_is_just_text() -> None:
    assert (await Harness().complete("NaN \U0001f600 Infinity")).status_code == 200


FORM = "application/x-www-form-urlencoded"


async def completed(body: str, kind: str | None) -> httpx.Response:
    headers = {} if kind is None else {"content-type": kind}
    async with Harness().client as client:
        return await client.post("/v1/completions", content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (json.dumps(PROMPT), "text/plain"),
        (json.dumps(PROMPT), "application/xml"),
        (json.dumps(PROMPT), "multipart/form-data; boundary=x"),
        (json.dumps(PROMPT), "application/jsonp"),
        ("model=tiny&prompt=hello", FORM),
        ("", FORM),
    ],
)
async def test_another_content_type_is_a_415(body: str, kind: str) -> None:
    response = await completed(body, kind)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    "kind",
    [None, "", FORM, f"{FORM}; charset=utf-8", "Application/JSON; charset=utf-8", "a/b+json"],
)
async def test_no_content_type_and_curls_own_are_accepted_around_json(kind: str | None) -> None:
    assert (await completed("\n " + json.dumps(PROMPT), kind)).status_code == 200
    response = await completed('{"model": "tiny", "prompt": "cut o', kind)
    assert response.status_code == 400
    assert "not JSON" in error_of(response)["message"]


@pytest.mark.parametrize(
    "host",
    ["x/health", "/health?", "a?b", "a#b", "user@x", "a b", "a:b", "[::1", "a\\b", "x:80:90"],
)
async def test_a_host_with_more_than_a_host_is_refused(host: str) -> None:
    """With the right key. Without it the answer is a 401, since no decision depends on the host."""
    response = await Harness(api_key="k").get(
        "/v1/models", headers={"host": host, "authorization": "Bearer k"}
    )
    assert response.status_code == 400
    assert "Host" in error_of(response)["message"]


@pytest.mark.parametrize(
    "host", ["x", "x.example", "x:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", ""]
)
async def test_a_plain_host_is_accepted(host: str) -> None:
    assert (await Harness().get("/v1/models", headers={"host": host})).status_code == 200


async def test_null_fields_ask_for_nothing_whatever_their_name() -> None:
    assert (await Harness().complete(surprise=None, logits_processors=None)).status_code == 200
    assert (await Harness().chat(surprise=None, reasoning=None)).status_code == 200
    response = await Harness().complete(model=None)
    assert response.status_code == 400
    assert error_of(response)["param"] == "model"


async def test_a_body_over_the_limit_is_a_413_with_and_without_a_length() -> None:
    harness = Harness(max_body_bytes=2000)
    response = await harness.complete("a" * 3000)
    assert response.status_code == 413

    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 1000

    async with harness.client as client:
        response = await client.post(
            "/v1/completions", content=chunks(), headers={"content-type": "application/json"}
        )
    assert response.status_code == 413
    assert "2000 bytes" in error_of(response)["message"]


async def test_an_unknown_model_is_a_404() -> None:
    for response in (
        await Harness().complete(model="gpt-99"),
        await Harness().chat(model="gpt-99"),
        await Harness().post("/tokenize", {"model": "gpt-99", "prompt": "a"}),
        await Harness().get("/v1/models/gpt-99"),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        assert "gpt-99" in error_of(response)["message"]


async def test_an_adapter_without_enable_lora_names_the_flag() -> None:
    """R03: the remedy is the operator's, so that the error says what to start the server with."""
    adapters = {**PROMPT, "adapters": [{"name": "a", "weight": 0.5}]}
    for body in (adapters, {**PROMPT, "lora_path": "a"}, {**PROMPT, "model": "a"}):
        response = await Harness().post("/v1/completions", body)
        assert response.status_code == 404
        assert "runs without --enable-lora" in error_of(response)["message"]


async def test_unknown_routes_and_methods_use_the_envelope_too() -> None:
    response = await Harness().get("/nope")
    assert response.status_code == 404
    assert "/nope" in error_of(response)["message"]
    response = await Harness().get("/v1/completions")
    assert response.status_code == 405
    assert "GET" in error_of(response)["message"]
    assert "send POST" in error_of(response)["message"]
    assert (await Harness().post("/v1/completions/", PROMPT)).status_code == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base address without /v1
        ("/completions", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),  # or with two
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/v1/responses", "/v1/responses"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
async def test_a_wrong_path_is_told_the_nearest(path: str, meant: str) -> None:
    response = await Harness().post(path, PROMPT)
    assert response.status_code == 404
    assert f"did you mean {meant}?" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "flag"),
    [("/v1/load_lora_adapter", "--enable-lora-endpoints"), ("/pause", "--admin-key")],
)
async def test_a_path_that_is_switched_off_is_told_its_flag(path: str, flag: str) -> None:
    response = await Harness().post(path, {})
    assert response.status_code == 404
    assert f"start the server with {flag}" in error_of(response)["message"].replace(
        "--enable-lora ", ""
    )


@pytest.mark.parametrize("path", ["/", "/nope", "/v1/moderations"])
async def test_a_path_that_is_near_to_none_is_told_none(path: str) -> None:
    assert "did you mean" not in error_of(await Harness().post(path, PROMPT))["message"]


async def test_a_compressed_body_is_a_415_that_names_the_encoding() -> None:
    async with Harness().client as client:
        response = await client.post(
            "/v1/completions",
            content=gzip.compress(json.dumps(PROMPT).encode()),
            headers={"content-type": "application/json", "content-encoding": "gzip"},
        )
    assert response.status_code == 415
    assert "'gzip'" in error_of(response)["message"]


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    """As some editors write it in front of a file that is then sent."""
    response = await completed("\ufeff" + json.dumps(PROMPT), "application/json")
    assert response.status_code == 200


async def test_what_is_missing_is_named_with_what_to_do() -> None:
    response = await Harness().post("/v1/completions", {"prompt": "a"})
    assert error_of(response)["message"].startswith("model is missing; send one of the names")


async def test_too_many_or_too_large_headers_are_a_431() -> None:
    many = {f"x-{place}": "1" for place in range(101)}
    for headers in (many, {"x-big": "a" * 33_000}):
        response = await Harness().get("/health", headers=headers)
        assert response.status_code == 431
        assert error_of(response)["type"] == "invalid_request_error"
