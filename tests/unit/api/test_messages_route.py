"""Anthropic's messages, read by its own client (G05)."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx2  # what this client is made with
import pytest

from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness
from tests.unit.api.test_responses_route import CALL, TOOLS_TEMPLATE, saying
from tests.unit.text.tiny_tokenizer import TEMPLATE

pytestmark = pytest.mark.anyio

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client(harness: Harness, key: str = "k") -> anthropic.AsyncAnthropic:
    transport = httpx2.ASGITransport(harness.app, raise_app_exceptions=False)
    web = httpx2.AsyncClient(transport=transport, base_url="http://test")
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key=key, max_retries=0, http_client=web
    )


async def create(harness: Harness, **fields: Any) -> anthropic.types.Message:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    message = await client(harness).messages.create(model="tiny", **(given | fields))
    assert isinstance(message, anthropic.types.Message)
    return message


async def test_g05_a_message_and_what_it_took() -> None:
    message = await create(saying("yes"), system="be brief")
    [block] = message.content
    assert block.type == "text"
    assert block.text == "yes"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 4  # and the end
    assert message.usage.input_tokens > 10


async def test_g05_why_a_message_ended() -> None:
    cut = await create(Harness(), max_tokens=3)
    assert cut.stop_reason == "max_tokens"
    assert (cut.usage.cache_read_input_tokens, cut.usage.output_tokens) == (2, 3)
    stopped = await create(saying("yes and no"), stop_sequences=[" and"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " and")


async def test_g05_a_message_calls_tools() -> None:
    message = await create(saying(f"look: {CALL}"), tools=[TOOL], tool_choice={"type": "auto"})
    words, call = message.content
    assert words.type == "text"
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"


async def test_g05_the_stream_helper_adds_up_to_the_message() -> None:
    harness = saying(f"look: {CALL}")
    async with client(harness).messages.stream(
        model="tiny",
        max_tokens=64,
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    whole = await create(saying(f"look: {CALL}"), tools=[TOOL])
    assert text == "look:"
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert streamed.content[1].input == {"city": "Oslo"}  # type: ignore[union-attr]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_g05_a_tools_result_comes_back() -> None:
    harness = saying(CALL)
    first = await create(harness, tools=[TOOL])
    [call] = first.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    await create(harness, messages=messages, tools=[TOOL])
    prompt = harness.tokenizer.decode(harness.engine.submitted[1].prompt, skip_special_tokens=False)
    assert "<|begin|>tool\nrain<|end|>\n<|begin|>user\nand?<|end|>" in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt


async def test_g05_arguments_that_are_no_json_are_shown() -> None:
    bad = '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'
    message = await create(saying(bad), tools=[TOOL])
    [block] = message.content
    if block.type == "tool_use":
        assert block.input == {"_not_an_object": [1]}
    else:
        assert block.type == "text"


async def test_g05_counting_a_messages_tokens() -> None:
    harness = saying("yes")
    count = await client(harness).messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": "hi"}], system="be brief"
    )
    message = await create(harness, system="be brief")
    assert count.input_tokens == message.usage.input_tokens


async def test_g05_models_are_listed_as_anthropics_clients_read_them() -> None:
    harness = Harness()
    page = await client(harness).models.list()
    [model] = page.data
    assert (model.type, model.id, model.display_name) == ("model", "tiny", "tiny")
    assert model.created_at.timestamp() == model.model_extra["created"]  # type: ignore[index]
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "tiny", False)
    assert await client(harness).models.retrieve("tiny") == model


async def test_g05_the_key_comes_as_anthropics_clients_send_it() -> None:
    harness = Harness(api_key="k")
    assert (await create(harness)).role == "assistant"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await client(harness, "wrong").messages.create(
            model="tiny", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
    assert "x-request-id" in caught.value.response.headers


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
async def test_g05_what_a_message_cannot_be(fields: dict[str, Any], says: str) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    response = await Harness().post("/v1/messages", body | fields)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert says in response.json()["error"]["message"]


async def test_g05_errors_of_messages_have_anthropics_shape() -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client(Harness()).messages.create(
            model="nobody", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )
    response = await Harness().get("/v1/messages")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_g05_a_prompt_that_is_too_long_is_told_in_anthropics_words() -> None:
    """Agents shorten the chat when they read these words; there is no code to tell it by."""
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*512 tokens"):
        await create(Harness(), messages=[{"role": "user", "content": "x" * 600}])


@pytest.mark.parametrize("is_result", [True, False])
async def test_g05_documents_and_search_results_of_text_are_text(is_result: bool) -> None:
    harness = Harness()
    page = {"type": "text", "media_type": "text/plain", "data": "noon"}
    inner = {"type": "content", "content": [{"type": "text", "text": "rain"}]}
    blocks: list[Any] = [
        {"type": "document", "source": page, "title": "Clock", "citations": {"enabled": True}},
        {"type": "document", "source": inner},
        {
            "type": "search_result",
            "source": "http://a",
            "title": "A",
            "content": [{"type": "text", "text": "sun"}],
        },
    ]
    if is_result:
        blocks = [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]
    await create(harness, messages=[{"role": "user", "content": blocks}], max_tokens=1)
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert "Clock\nnoon\nrain\nA\nhttp://a\nsun" in prompt


@pytest.mark.parametrize("source", ["base64", "url", "file"])
async def test_g05_documents_of_bytes_are_refused_by_place(source: str) -> None:
    block = {"type": "document", "source": {"type": source, "data": "AA==", "url": "http://a"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].*'document'"):
        await create(Harness(), messages=[{"role": "user", "content": [block]}])


@pytest.mark.parametrize("is_listed", [True, False])
async def test_g05_what_changes_with_each_request_of_an_agent_is_no_part_of_its_prompt(
    is_listed: bool,
) -> None:
    """G05: Claude Code begins its system prompt with a nonce; no prompt would be cached."""
    harness = Harness()
    for nonce in ("b7c0e", "01f3a"):
        header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"
        blocks = [{"type": "text", "text": text} for text in (header, "be brief")]
        await create(harness, system=blocks if is_listed else f"{header}\nbe brief", max_tokens=1)
    await create(harness, system="be brief", max_tokens=1)
    first, second, plain = (submit.prompt for submit in harness.engine.submitted)
    assert first == second == plain


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("thinks", [True, False])
async def test_g05_thinking_is_told_to_a_template_that_knows_it(thinks: bool, name: str) -> None:
    harness = Harness(template=TEMPLATE.replace("enable_thinking", name))
    kind = "enabled" if thinks else "disabled"
    await create(harness, max_tokens=4, thinking={"type": kind, "budget_tokens": 1024})
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert prompt.endswith("hm ") is thinks


ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "hi"}],
}


async def test_g05_a_message_has_every_field_of_the_newest_api() -> None:
    """Null where this server has nothing to say: clients that check the published schema ask."""
    message = (await saying("yes").post("/v1/messages", ASKED)).json()
    assert [message[name] for name in ("stop_details", "container", "stop_sequence")] == [None] * 3
    usage = message["usage"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 0,
        "ephemeral_1h_input_tokens": 0,
    }
    assert usage["output_tokens_details"] == {"thinking_tokens": 0}
    assert usage["service_tier"] == "standard"
    assert {"server_tool_use", "inference_geo", "cache_creation_input_tokens"} <= set(usage)


async def test_g05_the_first_and_last_event_tell_the_same_fields() -> None:
    streamed = await saying("yes").post("/v1/messages", ASKED | {"stream": True})
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: ")
    ]
    start, end = events[0]["message"], events[-2]
    whole = (await saying("yes").post("/v1/messages", ASKED)).json()
    assert set(start) == set(whole)
    assert set(start["usage"]) == set(whole["usage"])
    assert (start["stop_reason"], start["content"]) == (None, [])
    assert start["usage"]["output_tokens"] == 0
    assert set(end["delta"]) == {"stop_reason", "stop_sequence", "stop_details", "container"}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_g05_what_was_thought_is_counted() -> None:
    engine = FakeEngine(script(*b"<think>so</think>yes"))
    harness = Harness(engine, template=TOOLS_TEMPLATE + "{# </think> #}")
    message = await create(harness)
    assert [block.type for block in message.content] == ["thinking", "text"]
    details = message.usage.output_tokens_details
    assert details is not None
    assert 2 <= details.thinking_tokens < message.usage.output_tokens


async def test_g05_thoughts_have_a_signature_with_which_clients_send_them_back() -> None:
    """G05: LiteLLM and the AI SDK drop streamed thoughts without one from the history."""
    engine = FakeEngine(script(*b"<think>so</think>yes"))
    harness = Harness(engine, template=TOOLS_TEMPLATE + "{# </think> #}")
    whole = await create(harness)
    async with client(harness).messages.stream(
        model="tiny", max_tokens=64, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        kinds = [
            event.delta.type if event.type == "content_block_delta" else event.type
            async for event in stream
        ]
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.content[0].type == "thinking"
        assert message.content[0].signature
    told = [kind for kind in kinds if kind.endswith(("_delta", "_stop"))]
    assert told[:4] == [*["thinking_delta"] * 2, "signature_delta", "content_block_stop"]


async def test_g05_an_answer_that_the_caller_began_goes_on() -> None:
    harness = saying(") Helios")
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is (B"}]
    message = await create(harness, messages=begun)
    assert message.content[0].text == ") Helios"  # type: ignore[union-attr]
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert prompt.endswith("<|begin|>assistant\nIt is (B")


async def test_g05_what_was_cached_is_counted_once() -> None:
    harness = Harness()
    usage = (await create(harness, max_tokens=3)).usage
    assert usage.cache_read_input_tokens == 2
    assert usage.input_tokens + 2 == len(harness.engine.submitted[0].prompt)


async def test_g05_a_limit_beyond_the_context_is_no_fault() -> None:
    """The field is required, so clients send the most that any model takes."""
    message = await create(Harness(), max_tokens=4096, extra_body={"ignore_eos": True})
    assert message.stop_reason == "model_context_window_exceeded"
    assert 400 < message.usage.output_tokens < 512
    body = ASKED | {"messages": [{"role": "user", "content": "x" * 600}]}
    refused = (await Harness().post("/v1/messages", body)).json()
    assert "maximum context length is 512" in refused["error"]["message"]


@pytest.mark.parametrize("kind", ["clear_thinking_20251015", "clear_tool_uses_20250919"])
async def test_g05_nothing_is_taken_out_of_a_conversation(kind: str) -> None:
    management = {"edits": [{"type": kind}]}
    body = ASKED | {"context_management": management}
    assert (await Harness().post("/v1/messages", body)).is_success


async def test_g05_each_of_several_calls_has_its_own_arguments() -> None:
    other = CALL.replace("Oslo", "Rome")
    message = await create(saying(f"{CALL}\n{other}"), tools=[TOOL])
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2


async def test_g05_blocks_have_the_fields_that_the_published_schema_requires() -> None:
    body = ASKED | {"tools": [TOOL]}
    words, call = (await saying(f"look: {CALL}").post("/v1/messages", body)).json()["content"]
    assert words == {"type": "text", "text": "look:", "citations": []}
    assert call["caller"] == {"type": "direct"}


FOUND = {"type": "tool_reference", "tool_name": "weather"}
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}


def changed(kind: str, name: str, **definition: Any) -> dict[str, Any]:
    tool: dict[str, Any] = {"type": "tool_reference", "name": name}
    if definition:
        tool = {"type": "tool_definition", "definition": {"name": name, **definition}}
    return {"type": kind, "tool": tool}


async def test_g02_tools_that_a_search_found_are_named_and_offered() -> None:
    """Claude Code searches for tools itself (ENABLE_TOOL_SEARCH); later ones are deferred."""
    harness = saying("yes")
    use = {"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {"query": "rain"}}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [FOUND]}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [found]},
    ]
    await create(harness, messages=messages, tools=[TOOL, LOOK])
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert "<|begin|>tool\nTool available: weather<|end|>" in prompt
    assert '"name": "look"' in prompt


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ([changed("tool_addition", "look")], ["weather", "look"]),
        ([changed("tool_removal", "weather")], ["look"]),
        ([changed("tool_removal", "look"), changed("tool_addition", "look")], ["weather", "look"]),
        ([changed("tool_addition", "new", input_schema={})], ["weather", "look", "new"]),
        ([changed("tool_addition", "weather", description="v2")], ["look", "weather"]),
        ([changed("tool_removal", "other")], ["weather", "look"]),
    ],
)
async def test_g02_a_conversation_changes_its_tools(changes: list[Any], offered: list[str]) -> None:
    """The prompt has one list: the one at the end of the conversation."""
    harness = saying("yes")
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": changes},
        {"role": "user", "content": [*changes, {"type": "text", "text": "and?"}]},
    ]
    await create(harness, messages=messages, tools=[TOOL, LOOK])
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert re.findall(r'"function": {"name": "(\w+)"', prompt) == offered
    assert "<|begin|>user\nhi<|end|>\n<|begin|>user\nand?<|end|>" in prompt  # and nothing between


@pytest.mark.parametrize(
    "change",
    [
        {"type": "tool_addition"},
        {"type": "tool_removal", "tool": {"type": "mcp_tool_reference", "name": "x"}},
        {"type": "tool_removal", "tool": {"type": "tool_definition", "definition": LOOK}},
        {"type": "tool_addition", "tool": {"type": "tool_definition"}},
    ],
)
async def test_g02_other_changes_of_tools_are_refused_by_place(change: Any) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [change]}]}
    response = await Harness().post("/v1/messages", body)
    assert response.status_code == 400
    assert "messages[0].content[0].tool" in response.json()["error"]["message"]


async def test_g02_a_conversation_of_changes_alone_is_empty() -> None:
    content = [changed("tool_addition", "look")]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    response = await Harness().post("/v1/messages", body)
    assert response.status_code == 400
    assert "messages is empty" in response.json()["error"]["message"]
