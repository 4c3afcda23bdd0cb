"""What clients send back from an answer, and what their defaults add, is accepted (G04)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.unit.api.harness import Harness, error_of, events

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}


async def answered(*messages: Any) -> int:
    body = {"model": "tiny", "messages": list(messages), "max_tokens": 2}
    return (await Harness().post("/v1/chat/completions", body)).status_code


async def test_g04_an_answer_is_history_as_the_client_dumps_it() -> None:
    answer = ChatCompletion.model_validate((await Harness().chat(max_tokens=2)).json())
    message = answer.choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "refusal"} <= message.keys()
    assert await answered(USER, message, USER) == 200


@pytest.mark.parametrize(
    "more",
    [
        {"provider_specific_fields": {"refusal": None}},
        {"reasoning_content": "hm", "reasoning": "hm", "thinking_blocks": []},
        {"annotations": [], "parsed": {"a": 1}, "refusal": None},
        {"content": None},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"prefix": False, "partial": False, "images": [], "documents": [], "audio": None},
        {"function_call": None, "audio": None, "tool_calls": None},
        {"surprise": 1},
    ],
)
async def test_g04_what_an_answer_was_given_on_its_way_changes_nothing(more: Any) -> None:
    assert await answered(USER, {"role": "assistant", "content": "yes", **more}, USER) == 200


async def test_g04_thoughts_are_taken_by_either_name() -> None:
    """A client that keeps both names has null in one of them."""
    harness = Harness(template="{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    for thoughts in ({"reasoning_content": None, "reasoning": "hm"}, {"reasoning_content": "hm"}):
        answer = {"role": "assistant", "content": "yes", **thoughts}
        body = {"model": "tiny", "messages": [USER, answer], "max_tokens": 1}
        await harness.post("/v1/chat/completions", body)
    assert [bytes(item.prompt) for item in harness.engine.submitted] == [b"hm", b"hm"]


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "hm"}]])
async def test_g04_thoughts_may_be_parts_of_the_content(thinking: Any) -> None:
    """As Mistral's API has them, and vLLM takes them."""
    harness = Harness(
        template="{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    )
    parts = [
        {"type": "thinking", "thinking": thinking},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes"},
    ]
    for content in (parts, parts[:2]):
        body = {"model": "tiny", "messages": [USER, {"role": "assistant", "content": content}]}
        assert (await harness.post("/v1/chat/completions", body)).status_code == 200
    prompts = [bytes(item.prompt) for item in harness.engine.submitted]
    assert prompts == [b"|hi;hm|yes;", b"|hi;hm|;"]
    refused = await harness.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    )
    assert error_of(refused)["param"] == "messages[0].content[0]"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "be brief"}], "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c"},
    ],
)
async def test_g04_roles_parts_and_names_are_as_openais(message: Any) -> None:
    assert await answered(message, USER) == 200


@pytest.mark.parametrize("name", ["function_call", "audio", "prefix", "images"])
async def test_g04_what_would_change_the_answer_is_refused(name: str) -> None:
    message = {"role": "assistant", "content": "yes", name: {"a": 1}}
    body = {"model": "tiny", "messages": [USER, message]}
    response = await Harness().post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == f"messages[1].{name}"


@pytest.mark.parametrize(
    "fields",
    [
        {"include_reasoning": True},
        {"include_reasoning": False, "max_tokens": None, "max_completion_tokens": None},
        {"stream": True, "stream_options": {"include_usage": None, "chunk_size": None}},
        {"stream": False, "stream_options": None, "tools": None, "tool_choice": None, "n": None},
    ],
)
async def test_g04_fields_of_requests_that_ask_for_nothing(fields: Any) -> None:
    assert (await Harness().chat(**fields)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_g04_usage_in_every_chunk_if_asked(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "stream": True, "stream_options": options, "max_tokens": 3}
    body |= {"prompt": "ab"} if path == "/v1/completions" else {"messages": [USER]}
    *chunks, last, done = events(await Harness().post(path, body))
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert {2, 3} <= set(counts)  # the first token may have no text
    assert counts == sorted(counts)
    assert last["usage"]["completion_tokens"] == 3
    del options["continuous_usage_stats"]
    *chunks, last, _ = events(await Harness().post(path, body))
    assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}
