"""A thousand streams that are all open at once, over real sockets, and all end whole."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from manyroots.bench.http_stream import HttpStreams
from manyroots.messages import Output, Submit
from tests.unit.api.fake_engine import INFO, FakeEngine
from tests.unit.api.test_server_life import BODY, Life

pytestmark = pytest.mark.anyio

NUM_STREAMS = 1000
NUM_TOKENS = 4


class Holding(FakeEngine):
    """Gives every stream its first token, and the second when all of them have the first."""

    def __init__(self, count: int, **more: Any) -> None:
        super().__init__(**more)
        self._count = count
        self.num_open = self.most_open = 0
        self._all_open = asyncio.Event()

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        is_first = True
        async for output in super().generate(request):
            yield output
            if is_first:  # asked for the next: the first has been written
                is_first = False
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                if self.num_open == self._count:
                    self._all_open.set()
                await self._all_open.wait()
        self.num_open -= 1


async def test_a_thousand_streams_are_open_at_once_and_end_whole(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, model_path=str(tmp_path / "m.gguf"), max_num_seqs=NUM_STREAMS)
    engine = Holding(NUM_STREAMS, info=info)
    life = Life(tmp_path, engine, max_queued_requests=NUM_STREAMS)
    body = {**BODY, "stream": True, "max_tokens": NUM_TOKENS}
    body["stream_options"] = {"include_usage": True}

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        streams = HttpStreams(life.url, None)
        answers = await asyncio.gather(
            *(streams.post("/v1/completions", body) for _ in range(NUM_STREAMS))
        )
        streams.close()
        assert engine.most_open == NUM_STREAMS
        assert len(answers) == NUM_STREAMS
        for answer in answers:
            events = [event for _, event in answer.events]
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            assert text == "abab"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
            assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        life.server._on_signal()

    assert await life.run(script) == 0
    assert not engine.running
