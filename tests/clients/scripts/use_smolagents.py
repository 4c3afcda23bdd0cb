"""smolagents: messages, tools whole and streamed, and an agent that calls one."""

from __future__ import annotations

from typing import Any

from reporting import KEY, MODEL, V1, main
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]}]
STOPS = ["Observation:", "Calling tools:"]


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: of which city
    """
    return f"sunny in {city}"


def model(max_tokens: int = 40) -> Any:
    return OpenAIServerModel(MODEL, api_base=V1, api_key=KEY, max_tokens=max_tokens, temperature=0)


def messages() -> None:
    assert model().generate(MESSAGES, stop_sequences=STOPS).content


def tools() -> None:
    """Cut short in a second call: nothing of that may be content."""
    for max_tokens in (30, 40):
        said = model(max_tokens).generate(
            MESSAGES, stop_sequences=STOPS, tools_to_call_from=[weather]
        )
        assert not said.content
        assert said.tool_calls[0].function.name == "weather"


def tools_streamed() -> None:
    parts = list(model().generate_stream(MESSAGES, tools_to_call_from=[weather]))
    assert any(part.tool_calls for part in parts)
    assert not "".join(part.content or "" for part in parts)


def an_agent() -> None:
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2, verbosity_level=0)
    assert agent.run("Weather in Rome?") is not None


CHECKS = [messages, tools, tools_streamed, an_agent]

if __name__ == "__main__":
    main(CHECKS)
