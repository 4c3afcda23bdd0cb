"""openai-agents: an agent with a tool, over chats and over the Responses API."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main

set_tracing_disabled(True)
CALLS: list[str] = []


class Report(BaseModel):
    """What the agent ends with: a shape, so that a model of 135M comes to an end."""

    words: str = Field(max_length=20)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    CALLS.append(city)
    return "rain"


def run(kind: type, stream: bool = False) -> None:
    async def go() -> object:
        client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
        agent = Agent(
            name="helper",
            instructions="Use the tool, then answer.",
            model=kind(model=MODEL, openai_client=client),
            tools=[weather],
            output_type=Report,
            model_settings=ModelSettings(tool_choice="required", max_tokens=400, temperature=0),
        )
        if not stream:
            return (await Runner.run(agent, "Weather in Oslo?", max_turns=4)).final_output
        result = Runner.run_streamed(agent, "Weather in Oslo?", max_turns=4)
        async for _ in result.stream_events():
            pass
        return result.final_output

    CALLS.clear()
    assert isinstance(asyncio.run(go()), Report)
    assert CALLS


def chats() -> None:
    run(OpenAIChatCompletionsModel)


def chats_streamed() -> None:
    run(OpenAIChatCompletionsModel, stream=True)


def responses() -> None:
    run(OpenAIResponsesModel)


def responses_streamed() -> None:
    run(OpenAIResponsesModel, stream=True)


CHECKS = [chats, chats_streamed, responses, responses_streamed]

if __name__ == "__main__":
    main(CHECKS)
