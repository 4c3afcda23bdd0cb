"""The Responses API, read by OpenAI's own client (G05)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from manyroots.api.openai_responses.tools import chat_choice
from manyroots.messages import FinishReason, Output
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio

TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def saying(text: str) -> Harness:
    engine = FakeEngine(script(*text.encode()))
    return Harness(engine, template=TOOLS_TEMPLATE)


def client(harness: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="k", max_retries=0, http_client=harness.client
    )


async def test_g05_a_text_and_what_it_took() -> None:
    answer = await client(saying("yes")).responses.create(
        model="tiny", input="hi", instructions="be brief", metadata={"a": "b"}
    )
    assert answer.output_text == "yes"
    assert answer.status == "completed"
    assert answer.instructions == "be brief"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4  # and the end
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4


async def test_g05_counting_a_responses_tokens() -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "instructions": "x", "tools": [TOOL]}
    count = await client(saying("yes")).responses.input_tokens.count(**asked)
    answer = await client(saying("yes")).responses.create(**asked)
    assert answer.usage is not None
    assert count.input_tokens == answer.usage.input_tokens
    assert count.object == "response.input_tokens"
    with pytest.raises(openai.NotFoundError, match="nope"):
        await client(saying("yes")).responses.input_tokens.count(model="nope", input="hi")


async def test_g05_an_answer_that_is_cut_off_is_incomplete() -> None:
    answer = await client(Harness()).responses.create(model="tiny", input="hi", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_g05_the_stream_helper_adds_the_events_up() -> None:
    async with client(saying(f"look: {CALL}")).responses.stream(
        model="tiny",
        input="hi",
        tools=[TOOL],  # type: ignore[list-item]
    ) as stream:
        kinds = [event.type async for event in stream]
        whole = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    )
    message, call = whole.output
    assert message.type == "message"
    assert whole.output_text == "look:"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


async def test_g05_events_are_numbered_and_named() -> None:
    body = {"model": "tiny", "input": "hi", "stream": True}
    text = (await saying("yes").post("/v1/responses", body)).text
    events = [item.split("\n") for item in text.split("\n\n") if item]
    datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [d["type"] for d in datas]
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert "".join(data.get("delta", "") for data in datas) == "yes"


async def test_g05_a_stream_that_fails_ends_with_the_response() -> None:
    """Codex ignores the event `error`: without the other it would not show why."""
    engine = FakeEngine(
        lambda submit: [
            Output(submit.request_id, [97], None, 0),
            Output(submit.request_id, [], FinishReason.ERROR, 0, error="NaN logits"),
        ]
    )
    stream = await client(Harness(engine)).responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    told, failed = events[-2:]
    assert told.type == "error"
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert failed.response.error.code == "server_error"
    assert "NaN logits" in failed.response.error.message
    assert "NaN logits" in told.message


async def test_g05_a_conversation_with_a_tool_comes_back_as_input() -> None:
    harness = saying(CALL)
    speaker = client(harness)
    first = await speaker.responses.create(model="tiny", input="hi", tools=[TOOL])  # type: ignore[list-item]
    [call] = first.output
    assert call.type == "function_call"
    given: list[Any] = [{"role": "user", "content": "hi"}, call.model_dump()]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    await speaker.responses.create(model="tiny", input=given, tools=[TOOL])  # type: ignore[list-item]
    prompt = harness.tokenizer.decode(harness.engine.submitted[1].prompt, skip_special_tokens=False)
    assert "<|begin|>tool\nrain<|end|>" in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 600}, "input"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"ignore_eos": True, "text": {"format": {"type": "json_object"}}}, "ignore_eos"),
    ],
)
async def test_g05_what_a_response_cannot_be(fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "input": "hi"} | fields
    response = await Harness().post("/v1/responses", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_g05_an_item_by_its_id_is_refused_with_the_remedy() -> None:
    """G05: clients that believe that answers are stored send ids of items in the next turn."""
    given = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "fc_1"}]
    response = await Harness().post("/v1/responses", {"model": "tiny", "input": given})
    assert response.status_code == 400
    assert error_of(response)["param"] == "input[1]"
    assert "store: false" in error_of(response)["message"]


async def test_g05_words_and_calls_of_one_answer_are_one_message() -> None:
    harness = saying(f"look: {CALL}")
    body: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    output = (await harness.post("/v1/responses", body)).json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "rain"}
    history = [{"role": "user", "content": "hi"}, *output, result]
    await harness.post("/v1/responses", body | {"input": history})
    prompt = harness.tokenizer.decode(harness.engine.submitted[1].prompt, skip_special_tokens=False)
    assert "<|begin|>assistant\nlook:<tool_call>" in prompt


async def test_g05_what_benchmarks_send_beside_openais_fields() -> None:
    """As guidellm and aiperf do for answers of one length."""
    harness = saying("yes")
    body = {"model": "tiny", "input": "hi", "ignore_eos": True, "stop": None, "min_tokens": 2}
    answer = (await harness.post("/v1/responses", body | {"max_output_tokens": 6})).json()
    sampling = harness.engine.submitted[0].sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 2, 6)
    assert answer["object"] == "response"


async def test_g05_logprobs_of_a_response() -> None:
    answer = await client(Harness()).responses.create(
        model="tiny",
        input="hi",
        max_output_tokens=3,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    [message] = answer.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert all(len(item.top_logprobs) == 2 for item in part.logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_g05_every_token_of_a_responses_text_has_its_logprob(stream: bool) -> None:
    """G05: also the first part of a character, which has no text of its own yet."""
    harness = Harness(template="{{ messages[-1].content }}")
    body = {"model": "tiny", "input": "né!", "max_output_tokens": 4, "top_logprobs": 1}
    response = await harness.post("/v1/responses", body | {"stream": stream})
    if stream:
        datas = [item.partition("data: ")[2] for item in response.text.split("\n\n") if item]
        told = [json.loads(data) for data in datas]
        entries = [entry for data in told if "delta" in data for entry in data["logprobs"]]
    else:
        entries = response.json()["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "né!"


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
PATCH_TEXT = '*** Begin Patch\n+"x"\n'
PATCH_CALL = {"name": "apply_patch", "arguments": {"input": PATCH_TEXT}}
PATCHES = f"<tool_call>\n{json.dumps(PATCH_CALL)}\n</tool_call>"
SPACED = {"type": "namespace", "name": "files", "tools": [PATCH]}


async def test_g05_a_custom_tool_is_called_with_a_text() -> None:
    """As Codex offers apply_patch: the model knows it as a function of one string."""
    harness = saying(PATCHES)
    async with client(harness).responses.stream(
        model="tiny",
        input="hi",
        tools=[PATCH],  # type: ignore[list-item]
    ) as stream:
        events = [event async for event in stream]
        whole = await stream.get_final_response()
    [call] = whole.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", PATCH_TEXT)
    assert whole.tools[0].type == "custom"
    kinds = [event.type for event in events]
    assert kinds[3:5] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    assert events[3].delta == events[4].input == PATCH_TEXT  # type: ignore[union-attr]
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "apply_patch"' in prompt
    assert '"required": ["input"]' in prompt
    assert "*** Begin Patch" in prompt  # the rule of its input


@pytest.mark.parametrize("output", ["Done", [{"type": "input_text", "text": "Done"}]])
@pytest.mark.parametrize("more", [{"status": "completed"}, {"namespace": "files"}])
async def test_g05_calls_of_custom_tools_come_back_as_input(output: Any, more: Any) -> None:
    """Also where the tool is not offered any more."""
    harness = saying("yes")
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": PATCH_TEXT}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": output}
    given = [{"role": "user", "content": "hi"}, call | more, result]
    response = await harness.post("/v1/responses", {"model": "tiny", "input": given})
    assert response.status_code == 200, response.text
    prompt = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    shown = PATCHES.replace("apply", "files__apply") if "namespace" in more else PATCHES
    assert f"<|begin|>assistant\n{shown}" in prompt
    assert "<|begin|>tool\nDone<|end|>" in prompt


@pytest.mark.parametrize("tools", [[PATCH], [TOOL, SPACED]])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "apply_patch"}],
        },
    ],
)
async def test_g02_a_custom_tool_can_be_demanded(tools: list[Any], choice: Any) -> None:
    text = PATCHES.replace("apply_patch", "files__apply_patch") if SPACED in tools else PATCHES
    body = {"model": "tiny", "input": "hi", "tools": tools, "tool_choice": choice}
    response = await saying(text).post("/v1/responses", body)
    assert response.status_code == 200, response.text
    [call] = response.json()["output"]
    assert (call["type"], call["name"], call["input"]) == (
        "custom_tool_call", "apply_patch", PATCH_TEXT,
    )  # fmt: skip
    assert call.get("namespace") == ("files" if SPACED in tools else None)


async def test_g02_what_a_model_writes_for_a_text_is_shown_as_it_is() -> None:
    text = PATCHES.replace('"input"', '"patch"')
    body = {"model": "tiny", "input": "hi", "tools": [PATCH]}
    [call] = (await saying(text).post("/v1/responses", body)).json()["output"]
    assert call["input"] == json.dumps({"patch": PATCH_TEXT})


class Counted(list[Any]):
    """Counts how often it is gone through."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return super().__iter__()


def test_r03_tools_are_gone_through_once_for_a_choice_among_many() -> None:
    """R03: for each allowed tool once, 10,000 of 1,000 took the event loop 6 s."""
    tools = Counted([TOOL, SPACED])
    listed = [{"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "weather"}]
    choice = chat_choice({"type": "allowed_tools", "tools": listed * 3}, tools)
    names = [tool["name"] for tool in choice["tools"]]
    assert names == ["files__apply_patch", "weather"] * 3
    assert tools.count == 1
