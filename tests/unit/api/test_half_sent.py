"""Requests that are half sent are given up, over raw sockets (R03)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from manyroots.api import server
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.test_server_life import BODY, Life

pytestmark = pytest.mark.anyio

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
TIMEOUT_S = 1.0
QUICK_S = 0.2
"""Where it must pass, not be kept."""


async def drip(port: int, start: bytes, drop: bytes) -> bytes:
    """Send the start, then a drop now and then for as long as the server listens. Again where the
    server has given up before it read the start, as on a busy machine it may."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await drip_once(port, start, drop)
            if answer or not start:
                return answer


async def patiently(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Again where the server has given up a connection before it read the request."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await client.get(path)
        except httpx.TransportError:
            assert time.monotonic() < deadline


async def drip_once(port: int, start: bytes, drop: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)

    async def go_on() -> None:
        while drop:
            await asyncio.sleep(QUICK_S / 10)
            writer.write(drop)
            await writer.drain()

    dripping = asyncio.create_task(go_on())
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        return b"reset"
    finally:
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(
    ("start", "drop", "part"),
    [
        (HEAD, b"", "headers"),
        (HEAD, b"X-More: 1\r\n", "headers"),
        (b"P", b"", "headers"),
        (HEAD + b"Content-Length: 100000\r\n\r\n{", b"", "body"),
        (HEAD + b"Content-Length: 100000\r\n\r\n{", b" ", "body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n", "body"),
    ],
)
async def test_r03_a_half_sent_request_is_a_408(
    tmp_path: Path, start: bytes, drop: bytes, part: str
) -> None:
    """R03: however it is dripped; others are served meanwhile, and it is counted."""
    life = Life(tmp_path, request_read_timeout_s=QUICK_S)
    port = int(life.url.rpartition(":")[2])

    async def script(client: httpx.AsyncClient) -> None:
        await patiently(client, "/live")  # on a connection that stays, as those after it use
        await life.ready(client)
        answer = await drip(port, start, drop)
        # A drop that meets a closed connection has the answer thrown away before it is read.
        if not (drop and answer == b"reset"):
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b"not whole after 0.2 s" in answer
        text = (await patiently(client, "/metrics")).text
        line = f'manyroots:request_read_timeouts_total{{model_name="tiny",part="{part}"}} 1.0'
        assert line in text
        assert life.server._state.service.concurrency.num_alive == 0
        life.server._on_signal()

    assert await life.run(script) == 0


async def test_r03_only_what_is_half_sent_has_a_deadline(tmp_path: Path) -> None:
    """R03: an answer may take longer; so may one request after another on a connection; a body
    that is refused unread, and a silent connection, are let go."""
    life = Life(tmp_path, request_read_timeout_s=TIMEOUT_S)
    port = int(life.url.rpartition(":")[2])

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        life.engine.gate.clear()
        answer = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await life.until_running(1)
        await asyncio.sleep(3 * TIMEOUT_S)
        life.engine.gate.set()
        assert (await answer).status_code == 200
        for _ in range(3):
            await asyncio.sleep(TIMEOUT_S / 2)
            assert (await client.get("/version")).status_code == 200
        assert await drip(port, b"", b"") == b""
        unread = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"
        assert (await drip(port, unread, b"")).startswith(b"HTTP/1.1 404 ")
        life.server._on_signal()

    assert await life.run(script) == 0


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (
            b"\x16\x03\x01\x02\x00\x01",
            400,
            "The request is no HTTP/1.1: ",
        ),  # HTTPS to a port of HTTP
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),  # no host
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400, "The request is no HTTP/1.1: "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "The request is no HTTP/1.1: "),
        (
            HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "send one of them",
        ),
    ],
    ids=["no HTTP", "no host", "an encoding", "a chunk of no size", "two lengths"],
)
async def test_r03_what_is_no_http_is_told_so_in_json(
    tmp_path: Path, sent: bytes, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R03: and the connection is closed."""
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 1)  # one that would stay is not waited for
    life = Life(tmp_path)
    port = int(life.url.rpartition(":")[2])

    async def script(client: httpx.AsyncClient) -> None:
        await life.ready(client)
        head, _, body = (await drip(port, sent, b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), head
        assert says in json.loads(body)["error"]["message"]
        assert (await client.get("/health")).status_code == 200
        life.server._on_signal()

    assert await life.run(script) == 0
