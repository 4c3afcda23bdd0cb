"""Anthropic's client: messages, streams, tools, counting."""

from __future__ import annotations

from anthropic import Anthropic
from reporting import KEY, MODEL, URL, main

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
ASK = [{"role": "user", "content": "Name a colour."}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=12, messages=ASK, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 12


def streamed() -> None:
    with client.messages.stream(model=MODEL, max_tokens=12, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")


def tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client.messages.create(
            model=MODEL, max_tokens=200, messages=ASK, tools=[TOOL], tool_choice=choice,
            extra_body={"temperature": 0},
        )  # fmt: skip
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert calls, "a call was asked for"
        assert all(set(call.input) == {"city"} for call in calls)
        assert answer.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    blocks = [block.model_dump() for block in answer.content]
    history = [
        *ASK,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    client.messages.create(model=MODEL, max_tokens=12, messages=history, tools=[TOOL])


def tools_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=ASK, tools=[TOOL], tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    ) as stream:  # fmt: skip
        whole = stream.get_final_message()
    assert {block.name for block in whole.content if block.type == "tool_use"} == {"weather"}


def counted() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 5


CHECKS = [message, streamed, tools, tools_streamed, counted]

if __name__ == "__main__":
    main(CHECKS)
