"""Streams that wait: headers and comments go out before the first token (G04)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import openai
import pytest

from manyroots.api import events as api_events
from manyroots.api.events import COMMENT
from manyroots.errors import UnavailableError
from manyroots.messages import Output, Submit
from tests.helpers.patience import PATIENCE_S
from tests.unit.api import test_messages_route, test_responses_route
from tests.unit.api.fake_engine import INFO, FakeEngine, script
from tests.unit.api.harness import Harness
from tests.unit.api.test_server_life import Life
from tests.unit.api.test_short_way import answer_to, chunks

pytestmark = pytest.mark.anyio

T = TypeVar("T")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
TURN: Any = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_events, "KEEP_ALIVE_S", 0.01)


def waiting() -> Harness:
    """Its engine gives nothing until its gate is set."""
    engine = FakeEngine(script(*b"yes"))
    engine.gate.clear()
    return Harness(engine)


async def waited_a_while(harness: Harness, answer: Awaitable[T]) -> T:
    """The answer of an engine that gives nothing for some time after it was asked."""

    async def open_gate() -> None:
        while not harness.engine.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        harness.engine.gate.set()

    result, _ = await asyncio.gather(answer, open_gate())
    return result


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
        signs = [(await asyncio.wait_for(take(), PATIENCE_S))["body"] for _ in range(2)]
        harness.engine.gate.set()
        pieces = []
        while (piece := await asyncio.wait_for(take(), PATIENCE_S))["more_body"]:
            pieces.append(piece["body"])
    assert b"data: " in b"".join(pieces)
    assert connection.sent.empty()  # nothing follows the end
    if path == "/v1/responses":
        assert signs[0].startswith(b"event: response.created")
        assert signs[1].startswith(b"event: response.in_progress")
    else:
        assert signs == [COMMENT] * 2


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


async def test_g05_a_response_that_waits_sends_events() -> None:
    """G05: Codex waits 300 s for one, whatever comments come. They are numbered like the others."""
    harness = waiting()
    speaker = test_responses_route.client(harness)
    asked = speaker.responses.create(model="tiny", input="hi", stream=True)
    events = [event async for event in await waited_a_while(harness, asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds.count("response.created") == 1
    assert kinds.count("response.in_progress") > 2
    assert kinds[-1] == "response.completed"


async def test_g04_an_error_before_the_headers_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_events, "KEEP_ALIVE_S", PATIENCE_S)

    def fail(submit: Any) -> Any:
        raise UnavailableError("not now")

    response = await Harness(FakeEngine(fail)).chat(stream=True)
    assert response.status_code == 503


class Slow(FakeEngine):
    """Silent for a while before each token."""

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        async for output in super().generate(request):
            await asyncio.sleep(0.05)
            yield output


async def test_g04_comments_come_between_tokens_as_whole_chunks(tmp_path: Path) -> None:
    """Over a socket, where tokens go another way than comments."""
    info = dataclasses.replace(INFO, model_path=str(tmp_path / "m.gguf"))
    life = Life(tmp_path, Slow(info=info))
    port = int(life.url.rpartition(":")[2])

    async def run(web: httpx.AsyncClient) -> None:
        await life.ready(web)
        _, body = await answer_to(port, "1.1", "Connection: close\r\n")
        pieces = chunks(body)
        places = [place for place, piece in enumerate(pieces) if piece == COMMENT]
        texts = [place for place, piece in enumerate(pieces) if b'"text"' in piece]
        assert len(texts) == 6
        assert places[0] < texts[0] < places[-1]
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
        life.server._on_signal()

    assert await life.run(run) == 0


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
    assert await waited_a_while(harness, say(test_responses_route.client(harness))) == "yes"


async def told(speaker: anthropic.AsyncAnthropic) -> str:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": [TURN]}
    async with speaker.messages.stream(**asked) as stream:
        return await stream.get_final_text()


async def test_g04_anthropics_client_reads_over_comments() -> None:
    harness = waiting()
    assert await waited_a_while(harness, told(test_messages_route.client(harness))) == "yes"
