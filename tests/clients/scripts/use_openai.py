"""OpenAI's own client: chat, completions, responses, embeddings, parse and stream helpers."""

from __future__ import annotations

import json
import math

from openai import OpenAI
from pydantic import BaseModel
from reporting import KEY, MODEL, V1, main

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
ASK = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Colour(BaseModel):
    name: str
    is_warm: bool


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12


def chat_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def chat_stream_helper() -> None:
    # What is cut off raises here, so it ends by itself.
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, max_tokens=100, stop=[" ", "."]
    ) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert "content.delta" in kinds
    assert whole.choices[0].message.content


def history_as_it_is_dumped() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8)
    history = [*ASK, answer.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    again = client.chat.completions.create(model=MODEL, messages=history, max_tokens=8)
    assert again.choices[0].message.content is not None


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=6, logprobs=2)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) == 6


def completions_streamed() -> None:
    stream = client.completions.create(model=MODEL, prompt="One, two", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Colour, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Colour)


def tools_required() -> None:
    tool = {"type": "function", "function": WEATHER}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[tool], tool_choice=choice, max_tokens=100,
            temperature=0,
        )  # fmt: skip
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city"}


def tools_streamed() -> None:
    tool = {"type": "function", "function": WEATHER}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[tool], tool_choice="required", max_tokens=100,
        temperature=0,
    ) as stream:  # fmt: skip
        list(stream)
        whole = stream.get_final_completion()
    assert whole.choices[0].message.tool_calls[0].function.name == "weather"


def responses() -> None:
    answer = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens


def responses_streamed() -> None:
    with client.responses.stream(model=MODEL, input="Hi.", max_output_tokens=12) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


def responses_parsed() -> None:
    answer = client.responses.parse(
        model=MODEL, input="Name a colour.", text_format=Colour, max_output_tokens=200,
        temperature=0,
    )  # fmt: skip
    assert isinstance(answer.output_parsed, Colour)


def responses_tools() -> None:
    answer = client.responses.create(
        model=MODEL, input="Weather in Oslo?", tools=[{"type": "function", **WEATHER}],
        tool_choice="required", max_output_tokens=100, temperature=0,
    )  # fmt: skip
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls[0].name == "weather"


def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a cat", "a kitten", "tax law"])
    vectors = [item.embedding for item in answer.data]
    assert len(vectors) == 3
    for vector in vectors:
        assert math.isclose(sum(x * x for x in vector), 1.0, rel_tol=1e-3)


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


CHECKS = [
    models, chat, chat_streamed, chat_stream_helper, history_as_it_is_dumped, completions,
    completions_streamed, parse, tools_required, tools_streamed, responses, responses_streamed,
    responses_parsed, responses_tools, embeddings,
]  # fmt: skip

if __name__ == "__main__":
    main(CHECKS)
