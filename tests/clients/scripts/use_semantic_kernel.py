"""semantic-kernel: chats whole and streamed, typed answers, functions that it runs itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, V1, main
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Place(BaseModel):
    name: str = Field(max_length=20)


class Sky:
    @kernel_function(name="weather", description="The weather of a city.")
    def weather(self, city: str) -> str:
        return f"sunny in {city}"


def service() -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=300)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


def settings(max_tokens: int = 60, **more: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(max_tokens=max_tokens, temperature=0, **more)


def asked() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message("What is the weather in Rome?")
    return history


async def chats() -> None:
    whole = str(await service().get_chat_message_content(asked(), settings()))
    parts = service().get_streaming_chat_message_content(asked(), settings())
    assert "".join([str(part) async for part in parts]) == whole


async def typed() -> None:
    wanted = settings(300, response_format=Place)
    Place.model_validate_json(str(await service().get_chat_message_content(asked(), wanted)))


async def functions() -> None:
    """Calls that were cut short are sent back as they came, and the chat goes on."""
    kernel = Kernel()
    kernel.add_plugin(Sky(), "sky")
    wanted = settings(function_choice_behavior=FunctionChoiceBehavior.Required(auto_invoke=True))
    answer = await service().get_chat_message_content(asked(), wanted, kernel=kernel)
    assert answer is not None


def run(check: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def done() -> None:
        asyncio.run(check())  # type: ignore[arg-type]

    done.__name__ = check.__name__
    return done


CHECKS = [run(check) for check in (chats, typed, functions)]

if __name__ == "__main__":
    main(CHECKS)
