"""Streams that wait: headers and comments go out before the first token (G04)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from manyroots.api import events as api_events
from manyroots.errors import UnavailableError
from tests.helpers.patience import PATIENCE_S
from tests.unit.api import test_messages_route, test_responses_route
from tests.unit.api.fake_engine import FakeEngine, script
from tests.unit.api.harness import Harness

pytestmark = pytest.mark.anyio

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
TURN: Any = {"role": "user", "content": "hi"}
COMMENT = b": waiting\n\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_events, "KEEP_ALIVE_S", 0.01)


def waiting() -> Harness:
    """Its engine gives nothing until its gate is set."""
    engine = FakeEngine(script(*b"yes"))
    engine.gate.clear()
    return Harness(engine)


def body_of(path: str) -> dict[str, Any]:
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 8},
        "/v1/responses": {"input": "hi", "max_output_tokens": 8},
        "/generate": {"text": "hi"},
    }
    chat = {"messages": [TURN], "max_tokens": 8}
    return {"model": "tiny", "stream": True} | asked.get(path, chat)


@pytest.mark.parametrize("path", PATHS)
async def test_g04_headers_and_comments_do_not_wait_for_the_first_token(path: str) -> None:
    harness = waiting()
    async with harness.connected(path, body_of(path)) as connection:
        take = connection.sent.get
        start = await asyncio.wait_for(take(), PATIENCE_S)
        assert (start["type"], start["status"]) == ("http.response.start", 200)
        for _ in range(2):
            assert (await asyncio.wait_for(take(), PATIENCE_S))["body"] == COMMENT
        harness.engine.gate.set()
        pieces = []
        while (piece := await asyncio.wait_for(take(), PATIENCE_S))["more_body"]:
            pieces.append(piece["body"])
    assert b"data: " in b"".join(pieces)
    assert connection.sent.empty()  # nothing follows the end


@pytest.mark.parametrize("path", PATHS)
async def test_g04_an_error_after_the_headers_is_an_event(path: str) -> None:
    harness = waiting()
    async with harness.connected(path, body_of(path)) as connection:
        await asyncio.wait_for(connection.sent.get(), PATIENCE_S)
        harness.engine.is_alive = False
        harness.engine.gate.set()
        pieces = []
        while (piece := await asyncio.wait_for(connection.sent.get(), PATIENCE_S))["more_body"]:
            pieces.append(piece["body"])
    text = b"".join(pieces).replace(COMMENT, b"")
    assert b"the engine died" in text
    assert b"error" in text


async def test_g04_an_error_before_the_headers_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_events, "KEEP_ALIVE_S", PATIENCE_S)

    def fail(submit: Any) -> Any:
        raise UnavailableError("not now")

    response = await Harness(FakeEngine(fail)).chat(stream=True)
    assert response.status_code == 503


async def completed(speaker: openai.AsyncOpenAI) -> str:
    stream = await speaker.completions.create(model="tiny", prompt="hi", stream=True)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def chatted(speaker: openai.AsyncOpenAI) -> str:
    stream = await speaker.chat.completions.create(model="tiny", messages=[TURN], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def responded(speaker: openai.AsyncOpenAI) -> str:
    async with speaker.responses.stream(model="tiny", input="hi") as stream:
        return (await stream.get_final_response()).output_text


@pytest.mark.parametrize("say", [completed, chatted, responded])
async def test_g04_openais_client_reads_over_comments(
    say: Callable[[openai.AsyncOpenAI], Awaitable[str]],
) -> None:
    harness = waiting()
    asyncio.get_running_loop().call_later(0.1, harness.engine.gate.set)
    assert await say(test_responses_route.client(harness)) == "yes"


async def test_g04_anthropics_client_reads_over_comments() -> None:
    harness = waiting()
    asyncio.get_running_loop().call_later(0.1, harness.engine.gate.set)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [TURN]}
    async with test_messages_route.client(harness).messages.stream(**asked) as stream:
        message = await stream.get_final_message()
    assert message.content[0].text == "yes"  # type: ignore[union-attr]
