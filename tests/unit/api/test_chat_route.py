"""POST /v1/chat/completions (S01)"""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness, error_of, events

pytestmark = pytest.mark.anyio
ANSWER = FakeEngine(script(*"olá!".encode()))


async def test_a_chat_is_answered() -> None:
    harness = Harness(FakeEngine(script(*"olá!".encode())))
    body = (await harness.chat("hi")).json()
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "olá!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    [submit] = harness.engine.submitted
    text = harness.tokenizer.decode(submit.prompt, skip_special_tokens=False)
    assert text == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
    assert submit.max_tokens == 512 - len(submit.prompt), "the rest of the context"


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason() -> None:
    response = await Harness(ANSWER).chat(stream=True, stream_options={"include_usage": True})
    first, *texts, last, usage, done = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in texts) == "olá!"
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


async def test_n_chats_stream_side_by_side() -> None:
    chunks = events(await Harness(ANSWER).chat(n=3, stream=True))[:-1]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "olá!"
        assert mine[-1]["finish_reason"] == "stop"


async def test_both_names_of_the_limit_are_known() -> None:
    for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        body = (await Harness().chat("hello", **fields)).json()
        assert body["usage"]["completion_tokens"] == 2
    both = await Harness().chat(max_tokens=2, max_completion_tokens=3)
    assert error_of(both)["param"] == "max_completion_tokens"


async def test_chat_logprobs_carry_bytes() -> None:
    body = (await Harness().chat(max_tokens=2, logprobs=True, top_logprobs=2)).json()
    [first, _] = body["choices"][0]["logprobs"]["content"]
    assert first["token"] == "<|begin|>"
    assert bytes(first["bytes"]) == b"<|begin|>"
    assert len(first["top_logprobs"]) == 2
    assert (await Harness().chat(max_tokens=2)).json()["choices"][0]["logprobs"] is None


async def test_options_reach_the_template() -> None:
    harness = Harness()
    await harness.chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=1)
    text = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert text.endswith("assistant\nhm ")


async def test_the_last_message_can_be_continued() -> None:
    harness = Harness()
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I th"}]
    response = await harness.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": messages, "max_tokens": 1,
         "add_generation_prompt": False, "continue_final_message": True},
    )  # fmt: skip
    assert response.status_code == 200
    text = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert text.endswith("<|begin|>assistant\nI th")


async def test_a_model_without_a_template_says_what_to_do() -> None:
    response = await Harness(template=None).chat()
    assert response.status_code == 400
    assert "--chat-template" in error_of(response)["message"]


async def test_prompt_logprobs_come_with_the_response() -> None:
    body = (await Harness().chat(max_tokens=1, prompt_logprobs=0, n=2)).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
KNOWS_TOOLS = "{{ tools | tojson }}{{ messages[-1].content }}</think>"


def says(text: str) -> FakeEngine:
    return FakeEngine(script(*text.encode()))


async def test_g02_calls_are_part_of_the_message() -> None:
    harness = Harness(says(f"Hm.{CALL}"))
    [choice] = (await harness.chat(tools=[WEATHER])).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"]["content"] == "Hm."
    [choice] = (await Harness(says(CALL)).chat(tools=[WEATHER])).json()["choices"]
    assert choice["message"]["content"] is None


async def test_g02_calls_are_streamed_as_they_come() -> None:
    chunks = events(await Harness(says(CALL)).chat(tools=[WEATHER], stream=True))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert parts[0]["index"] == 0
    assert parts[0]["id"].startswith("call_")
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(parts) > 10, "byte by byte, as this engine writes"
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Oslo"}'
    assert all("id" not in part and "name" not in part["function"] for part in parts[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_g02_without_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        [choice] = (await Harness(says(CALL)).chat(**fields)).json()["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


async def test_g02_tools_reach_a_template_that_knows_them() -> None:
    harness = Harness(says("x"), template=KNOWS_TOOLS)
    await harness.chat(tools=[WEATHER])
    await harness.chat(tools=[WEATHER], tool_choice="none")
    first, second = (
        harness.tokenizer.decode(submit.prompt, skip_special_tokens=False)
        for submit in harness.engine.submitted
    )
    assert '"city"' in first
    assert second.startswith("null")


async def test_g02_tools_are_told_in_words_to_a_template_that_does_not() -> None:
    harness = Harness(says("x"))
    harness.engine._info = dataclasses.replace(harness.engine.info, max_model_len=4096)
    harness = Harness(harness.engine)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no"},
        {"role": "tool", "tool_call_id": "d", "content": "never"},
    ]
    response = await harness.chat(messages=messages, tools=[WEATHER], max_tokens=1)
    assert response.status_code == 200, response.text
    text = harness.tokenizer.decode(harness.engine.submitted[0].prompt, skip_special_tokens=False)
    assert text.startswith("<|begin|>system\n# Tools")
    assert '"city"' in text
    assert '<|begin|>assistant\n<tool_call>\n{"name": "weather", "arguments": {}}' in text
    assert text.count("<|begin|>user\n") == 2, "both results are one message"
    assert "<tool_response>\nno\n</tool_response>\n<tool_response>\nnever" in text


async def test_g03_reasoning_is_told_apart() -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    harness = Harness(says(text), template=KNOWS_TOOLS)
    [choice] = (await harness.chat()).json()["choices"]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "yes"
    [choice] = (await harness.chat(include_reasoning=False)).json()["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "yes"
    harness = Harness(says(text), template=KNOWS_TOOLS)
    chunks = events(await harness.chat(stream=True))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


async def test_g03_reasoning_effort_reaches_the_template() -> None:
    for effort, end in (("low", "hm "), ("none", "assistant\n")):
        harness = Harness()
        await harness.chat(reasoning_effort=effort, max_tokens=1)
        prompt = harness.engine.submitted[0].prompt
        assert harness.tokenizer.decode(prompt, skip_special_tokens=False).endswith(end)
    own = Harness(template="{{ reasoning_effort }}{{ messages[0].content }}")
    await own.chat(reasoning_effort="high", max_tokens=1)
    prompt = own.engine.submitted[0].prompt
    assert own.tokenizer.decode(prompt, skip_special_tokens=False) == "highhi"
    without = Harness(template="{{ messages[0].content }}")
    assert (await without.chat(reasoning_effort="none", max_tokens=1)).status_code == 200
    refused = await own.chat(reasoning_effort="much")
    assert error_of(refused)["param"] == "reasoning_effort"
