"""Structured output, tools and their streams over HTTP: the official client, the real server and
the default model (G01, G02). A model of 135M calls nothing well of itself: shapes are held."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Tell me of a town."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["town", "people", "size"],
    "additionalProperties": False,
}
ARGUMENTS = {
    "type": "object",
    "properties": {"size": SCHEMA["properties"]["size"]},
    "required": ["size"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": ARGUMENTS}}


def test_g01_an_answer_follows_its_schema_in_another_process(
    client: openai.OpenAI, model: str
) -> None:
    """G01, S01: a masked row of the engine's own process, with choices of a free one beside it."""
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, response_format=wanted, max_tokens=120, n=2, seed=5,
        temperature=1.0,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(str(choice.message.content)), SCHEMA)
    text = client.completions.create(
        model=model, prompt="Yes or no?", max_tokens=8,
        extra_body={"structured_outputs": {"choice": ["certainly", "never"]}},
    ).choices[0].text  # fmt: skip
    assert text in ("certainly", "never")


def test_g01_a_schema_that_cannot_be_honoured_is_a_400_with_the_reason(
    client: openai.OpenAI, model: str
) -> None:
    bad: Any = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.completions.create(model=model, prompt="x", extra_body={"guided_json": bad})


def test_g02_a_forced_call_is_streamed_and_whole_the_same(
    client: openai.OpenAI, model: str
) -> None:
    """G02, S01: by a real server."""
    asked: dict[str, Any] = {
        "model": model, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 150, "temperature": 0,
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "parallel_tool_calls": False,
    }  # fmt: skip
    create: Any = client.chat.completions.create
    [choice] = create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "look_up"
    jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)
    name, arguments, reason = "", "", None
    for chunk in create(**asked, stream=True):
        delta = chunk.choices[0].delta
        reason = chunk.choices[0].finish_reason or reason
        for part in delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments, reason) == ("look_up", call.function.arguments, "tool_calls")
