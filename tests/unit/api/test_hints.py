"""What agents send to every server: hints without effect, and tools that only others run (G04)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from manyroots.adapter_names import LoraModule
from manyroots.api.notices import MAX_TOPICS
from manyroots.config import LoraSettings
from manyroots.sampling import ThinkingBudget
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of, events

pytestmark = pytest.mark.anyio

TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": False}
SEARCHED = {"type": "web_search_call", "id": "ws", "status": "completed",
            "action": {"type": "search", "query": "x"}}  # fmt: skip
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}, SEARCH],
}


def lines_about(caplog: pytest.LogCaptureFixture, topic: str) -> list[str]:
    return [line for line in caplog.messages if topic in line]


async def respond(harness: Harness, **fields: Any) -> Any:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 2} | fields
    return await harness.post("/v1/responses", body)


@pytest.mark.parametrize(
    ("path", "fields", "topic"),
    [
        ("/v1/messages", {"output_config": {"effort": "high"}}, "reasoning_effort"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/chat/completions", {"verbosity": "high"}, "verbosity"),
        ("/v1/chat/completions", {"surprise": {"a": 1}}, "surprise"),
        ("/v1/chat/completions", {"stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "name": "x"}]}, "custom"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "s"}]}, "web_search"),
        ("/v1/responses", {"client_metadata": {"a": "b"}}, "client_metadata"),
        ("/v1/responses", {"include": ["file_search_call.results"]}, "include"),
        ("/v1/responses", {"reasoning": {"effort": "high", "summary": "auto"}}, "summary"),
        ("/v1/responses", {"truncation": "auto"}, "truncation"),
        ("/v1/responses", {"tools": [SEARCH]}, "web_search"),
        ("/v1/responses", {"input": [SEARCHED, {"role": "user", "content": "a"}]}, "search_call"),
    ],
)  # fmt: skip
async def test_g04_a_hint_without_effect_is_taken_and_logged_once(
    path: str, fields: dict[str, Any], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(template=PLAIN)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    body = {"model": "tiny"} | ({"input": "hi"} if path.endswith("responses") else chat)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert (await harness.post(path, body | fields)).status_code == 200
    assert len(lines_about(caplog, topic)) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_g04_strict_requests_refuse_unknown_fields_by_name(path: str) -> None:
    harness = Harness(strict_requests=True)
    body = {"model": "tiny", "max_tokens": 1, "surprise": 1, "user": "u"}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user"}]}
    response = await harness.post(path, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "surprise"


async def test_g04_the_log_of_unknown_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    made_up = {f"name{number}\n": 1 for number in range(MAX_TOPICS + 50)}
    with caplog.at_level(logging.INFO):
        assert (await harness.complete(**made_up)).status_code == 200
        assert (await harness.complete(**{"y" * 10_000: 1})).status_code == 200
    told = lines_about(caplog, "does not know")
    assert len(told) == MAX_TOPICS
    assert max(map(len, caplog.messages)) < 200
    assert not any("\n" in line for line in caplog.messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [SEARCH], "tool_choice": {"type": "web_search"}},
        {"tools": [FUNCTION, SEARCH], "tool_choice": {"type": "web_search"}},
        {"tools": [SEARCH], "tool_choice": "required"},
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]},
         "tools": [SEARCH]},
    ],
)  # fmt: skip
async def test_g02_a_tool_that_cannot_be_run_is_refused_when_demanded(fields: Any) -> None:
    response = await respond(Harness(), **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == "tool_choice"
    assert "web_search" in error_of(response)["message"]


async def test_g02_a_hosted_tool_of_anthropics_is_refused_by_name() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    choice = {"type": "tool", "name": "web_search"}
    response = await Harness().post("/v1/messages", body | {"tools": tools, "tool_choice": choice})
    assert response.status_code == 400
    assert "web_search_20250305" in response.json()["error"]["message"]


def saying(text: str) -> Harness:
    return Harness(FakeEngine(script(*text.encode())), template=TOOLS_TEMPLATE)


CALL = '<tool_call>\n{"name": "agents__spawn", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_g02_functions_of_a_namespace_are_offered_called_and_sent_back(stream: bool) -> None:
    harness = saying(CALL)
    response = await respond(harness, tools=[FUNCTION, SPACE], max_output_tokens=200, stream=stream)
    assert response.status_code == 200
    whole = response.json() if not stream else stream_end(response)
    [call] = whole["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert "agents__spawn" in prompt
    assert "web_search" not in prompt
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    again = await respond(
        harness, input=[{"role": "user", "content": "hi"}, call, result], tools=[FUNCTION, SPACE]
    )
    assert again.status_code == 200
    prompt = harness.tokenizer.decode(harness.engine.submitted[1].prompt, skip_special_tokens=False)
    assert '"name": "agents__spawn", "arguments"' in prompt


def stream_end(response: Any) -> Any:
    assert response.headers["content-type"].startswith("text/event-stream")
    last = [line for line in response.text.splitlines() if line.startswith("data: ")][-1]
    return json.loads(last.removeprefix("data: "))["response"]


@pytest.mark.parametrize(
    "choice", [{"type": "function", "name": "spawn"},
               {"type": "function", "name": "spawn", "namespace": "agents"},
               {"type": "allowed_tools", "mode": "required",
                "tools": [{"type": "function", "name": "spawn"}]}],
)  # fmt: skip
async def test_g02_a_function_of_a_namespace_can_be_demanded(choice: Any) -> None:
    harness = saying(CALL)
    response = await respond(harness, tools=[FUNCTION, SPACE], tool_choice=choice)
    assert response.status_code == 200, response.text


async def test_s01_the_callers_id_is_part_of_the_answers() -> None:
    headers = {"x-request-id": "my-id.7"}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    bodies = {
        "/v1/completions": ({"model": "tiny", "prompt": "a"}, "cmpl-my-id.7"),
        "/v1/chat/completions": (chat, "chatcmpl-my-id.7"),
        "/v1/responses": ({"model": "tiny", "input": "a"}, "resp_my-id.7"),
        "/v1/messages": (chat, "msg_my-id.7"),
    }
    for path, (body, expected) in bodies.items():
        response = await Harness().post(path, body, headers=headers)
        assert response.json()["id"] == expected
    evil = await Harness().post("/v1/completions", bodies["/v1/completions"][0],
                                headers={"x-request-id": "a b\t{}"})  # fmt: skip
    assert "a b" not in evil.json()["id"]


async def test_g04_the_first_chunk_has_its_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *_ = events(await Harness().chat(stream=True, stream_options=options, max_tokens=2))
    assert first["usage"]["prompt_tokens"] > 0
    assert first["usage"]["completion_tokens"] == 0


async def test_s01_a_completion_without_a_limit_fills_the_context() -> None:
    """As vLLM reads null; left out, it is OpenAI's 16."""
    for fields, expected in (({"max_tokens": None}, 512 - 2), ({}, 16)):
        harness = Harness()
        response = await harness.complete([40, 41], **fields)
        assert response.status_code == 200
        submit = harness.engine.submitted[0]
        assert (submit.max_tokens or submit.sampling.max_tokens) == expected


async def test_g04_agents_knock_at_the_root() -> None:
    async with Harness(api_key="k").client as client:
        assert (await client.head("/")).status_code == 200
        assert (await client.get("/")).json()["name"] == "manyroots"


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [48, 49]), ("right", [40, 41]), (None, [48, 49])]
)
async def test_g04_a_prompt_is_cut_on_the_side_that_is_asked_for(
    side: Any, kept: list[int]
) -> None:
    fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    response = await Harness().complete(list(range(40, 50)), max_tokens=1, **fields)
    assert response.json()["choices"][0]["prompt_token_ids"] == kept
    refused = await Harness().complete(truncation_side="top")
    assert error_of(refused)["param"] == "truncation_side"


async def test_s04_metrics_need_no_key_and_name_no_adapter_without_theirs() -> None:
    lora = LoraSettings(enable_lora=True, lora_modules=(LoraModule("sql", "/x"),))
    open_to_all = Harness(lora=lora, api_key="k")
    guarded = Harness(lora=lora, api_key="k", metrics_key="m")
    for harness in (open_to_all, guarded):
        headers = {"authorization": "Bearer k"}
        body = {"model": "sql", "prompt": "ab", "max_tokens": 1}
        assert (await harness.post("/v1/completions", body, headers=headers)).status_code == 200
    assert 'adapter="sql"' in (await open_to_all.get("/metrics")).text
    for headers in ({}, {"authorization": "Bearer k"}, {"authorization": "Bearer wrong"}):
        bare = await guarded.get("/metrics", headers=headers)
        assert bare.status_code == 200
        assert "vllm:num_requests_running" in bare.text
        assert "sql" not in bare.text
    whole = await guarded.get("/metrics", headers={"authorization": "Bearer m"})
    assert 'adapter="sql"' in whole.text


THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"


@pytest.mark.parametrize(("opened", "is_begun"), [("", False), ("<think>", True)])
async def test_g03_a_thinking_budget_reaches_the_engine(opened: str, is_begun: bool) -> None:
    """G03: with the tokens that mark the reasoning, and whether the prompt has begun it."""
    harness = Harness(template=THINKS + opened)
    for mark in ("<think>", "</think>"):
        harness.tokenizer._backend.add_tokens([mark])
    begin, end = (harness.tokenizer.token_id(mark) for mark in ("<think>", "</think>"))
    assert begin is not None
    assert end is not None
    assert (await harness.chat(thinking_token_budget=7, max_tokens=1)).status_code == 200
    budget = harness.engine.submitted[-1].sampling.thinking_budget
    assert budget == ThinkingBudget(7, begin, end, is_begun=is_begun)
    assert (await harness.chat(max_tokens=1)).status_code == 200
    assert harness.engine.submitted[-1].sampling.thinking_budget is None


async def test_g03_a_thinking_budget_that_can_not_be_held() -> None:
    """G03: a model that does not reason keeps it anyway; marks of several tokens end nothing."""
    plain = Harness()
    assert (await plain.chat(thinking_token_budget=7, max_tokens=1)).status_code == 200
    assert plain.engine.submitted[-1].sampling.thinking_budget is None
    for harness, value, told in (
        (Harness(template=THINKS), 7, "no single token"),
        (plain, -1, "from 0 to"),
    ):
        refused = await harness.chat(thinking_token_budget=value, max_tokens=1)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thinking_token_budget"
        assert told in refused.json()["error"]["message"]
    text = await plain.complete("ab", thinking_token_budget=7)
    assert text.status_code == 400
    assert "/v1/chat/completions" in text.json()["error"]["message"]
