"""A stream's events on their short way to the socket: the same bytes as the long way gives."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from manyroots.api.connections import ChunkWriter
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.test_server_life import BODY, Life

pytestmark = pytest.mark.anyio


async def answer_to(port: int, version: str, headers: str = "") -> tuple[bytes, bytes]:
    """Head and body of a streamed completion, as they came."""
    body = json.dumps({**BODY, "stream": True, "max_tokens": 6}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    raw = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    first, _, rest = raw.partition(b"\r\n\r\n")
    return first, rest


def chunks(body: bytes) -> list[bytes]:
    """Of a body that comes in chunks; what is no chunk is an error."""
    found = []
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        found.append(rest[:length])
        body = rest[length + 2 :]
        if length == 0:
            assert body == b""
            return found


async def test_a_stream_is_whole_chunks_and_older_clients_get_none(tmp_path: Path) -> None:
    life = Life(tmp_path)
    port = int(life.url.rpartition(":")[2])

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        head, body = await answer_to(port, "1.1", "Connection: close\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        pieces = chunks(body)
        assert len(pieces) > 3
        old_head, old_body = await answer_to(port, "1.0")
        assert b"chunked" not in old_head.lower()
        events = [event for event in b"".join(pieces).split(b"\n\n") if event]
        old_events = [event for event in old_body.split(b"\n\n") if event]
        assert events[-1] == old_events[-1] == b"data: [DONE]"
        texts = [
            "".join(json.loads(event[6:])["choices"][0]["text"] for event in some[:-1])
            for some in (events, old_events)
        ]
        assert texts[0] == texts[1] != ""
        life.server._on_signal()

    assert await life.run(script) == 0


async def test_a_client_that_left_is_written_to_once(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio logs a warning for each write from the sixth on, and many events may be ready."""
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    flow = SimpleNamespace(write_paused=False)
    cycle: Any = SimpleNamespace(flow=flow, transport=transport, disconnected=False)
    theirs.close()
    writer = ChunkWriter(cycle)
    for _ in range(20):
        await writer.write(b"data: {}\n\n")
    assert transport.is_closing()
    assert "socket.send" not in caplog.text
