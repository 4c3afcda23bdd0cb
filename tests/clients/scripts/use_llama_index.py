"""llama-index: chats, completions, logprobs, tools, typed answers and an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main

QUESTION = "What is the weather in Rome?"


class Place(BaseModel):
    """A place."""

    name: str = Field(max_length=20)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


TOOL = FunctionTool.from_defaults(fn=weather)


def model(*, is_chat_model: bool = True, max_tokens: int = 40) -> Any:
    return OpenAILike(
        model=MODEL, api_base=V1, api_key=KEY, max_tokens=max_tokens, temperature=0, max_retries=0,
        is_chat_model=is_chat_model, is_function_calling_model=is_chat_model, timeout=300,
    )  # fmt: skip


def chats() -> None:
    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = model().chat(messages, logprobs=True, top_logprobs=2)
    assert whole.message.content
    assert len(whole.logprobs[0]) == 2
    streamed = "".join(part.delta or "" for part in model().stream_chat(messages))
    assert streamed == whole.message.content


def completions() -> None:
    whole = model(is_chat_model=False).complete("Once upon a time").text
    parts = model(is_chat_model=False).stream_complete("Once upon a time")
    assert "".join(part.delta for part in parts) == whole


def tools() -> None:
    answer = model().predict_and_call([TOOL], user_msg=QUESTION, tool_required=True)
    assert "sunny" in str(answer)


def typed() -> None:
    messages = [ChatMessage(role="user", content="A place.")]
    answer = model(max_tokens=300).as_structured_llm(Place).chat(messages)
    Place.model_validate_json(answer.message.content)


def an_agent() -> None:
    agent = FunctionAgent(tools=[TOOL], llm=model(), initial_tool_choice=TOOL.metadata.name)

    async def run() -> Any:
        return await agent.run(QUESTION)

    assert asyncio.run(run()) is not None


CHECKS = [chats, completions, tools, typed, an_agent]

if __name__ == "__main__":
    main(CHECKS)
