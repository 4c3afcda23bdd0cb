"""Haystack: chats whole and streamed, tools, embeddings."""

from __future__ import annotations

from typing import Any

from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from reporting import KEY, MODEL, V1, main

SERVER: dict[str, Any] = {
    "model": MODEL, "api_base_url": V1, "api_key": Secret.from_token(KEY),
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def reply(**options: Any) -> ChatMessage:
    generator = OpenAIChatGenerator(**SERVER, **options)
    return generator.run([ChatMessage.from_user("Weather in Rome?")])["replies"][0]


def a_chat() -> None:
    assert reply(generation_kwargs={"max_tokens": 16}).text


def a_stream() -> None:
    parts: list[str] = []
    said = reply(
        generation_kwargs={"max_tokens": 16},
        streaming_callback=lambda chunk: parts.append(chunk.content),
    )
    assert "".join(parts) == said.text


def tools() -> None:
    weather = Tool("weather", "the weather", CITY, lambda city: f"sunny in {city}")
    choice = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    [call] = reply(tools=[weather], generation_kwargs=choice).tool_calls
    assert call.arguments["city"] in ("Rome", "Oslo")


def embeddings() -> None:
    assert len(OpenAITextEmbedder(**SERVER).run("hi")["embedding"]) > 100


CHECKS = [a_chat, a_stream, tools, embeddings]

if __name__ == "__main__":
    main(CHECKS)
