"""pydantic-ai: agents that answer, stream, call tools and fill a type."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from reporting import KEY, MODEL, V1, main


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=20)
    is_warm: bool


PROVIDER = OpenAIProvider(base_url=V1, api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)


def settings(max_tokens: int) -> ModelSettings:
    return ModelSettings(max_tokens=max_tokens, temperature=0.0)


def answer() -> None:
    agent = Agent(CHAT, instructions="Be brief.")
    first = agent.run_sync("Name a colour.", model_settings=settings(12))
    assert first.output
    history = first.all_messages()
    assert agent.run_sync("Why?", message_history=history, model_settings=settings(12)).output


def streamed() -> None:
    async def stream() -> str:
        async with Agent(CHAT).run_stream("Hi.", model_settings=settings(12)) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(stream())


def typed_by_schema() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Colour))
    assert isinstance(agent.run_sync("A colour?", model_settings=settings(200)).output, Colour)


def typed_by_tool() -> None:
    agent = Agent(CHAT, output_type=ToolOutput(Colour))
    assert isinstance(agent.run_sync("A colour?", model_settings=settings(200)).output, Colour)


def tool_is_offered() -> None:
    agent = Agent(CHAT)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    assert agent.run_sync("Weather in Oslo?", model_settings=settings(40)).all_messages()


def responses() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=PROVIDER))
    assert agent.run_sync("Name a colour.", model_settings=settings(16)).output


CHECKS = [answer, streamed, typed_by_schema, typed_by_tool, tool_is_offered, responses]

if __name__ == "__main__":
    main(CHECKS)
