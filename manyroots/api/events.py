"""Responses that last: server-sent events, and answers that a client may stop waiting for.

Takes an async generator of chunks, or a coroutine; gives responses. In both a client that goes
away ends the work at once, which aborts its sequences and frees their pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from manyroots.api.concurrency import Permits
from manyroots.api.connections import WRITER, ChunkWriter
from manyroots.api.errors import error_body, error_response
from manyroots.errors import ManyrootsError

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 10.0
"""A stream is never silent for twice as long. Clients and proxies give up silent ones: proxies
often after 60 s, Node.js after 300 s without headers."""
COMMENT = b": waiting\n\n"


def event(value: msgspec.Struct) -> bytes:
    return b"data: " + _on_one_line(encode(value)) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event as Responses and Anthropic's messages send them: with its type in front."""
    return b"event: " + name.encode() + b"\ndata: " + _on_one_line(encode(value)) + b"\n\n"


_LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


def _on_one_line(data: bytes) -> bytes:
    """JSON with Unicode's own line ends as escapes: many clients' readers of lines (Python's
    `splitlines`, and so httpx) would take an event apart there."""
    if not data.isascii():
        for raw, escape in _LINE_ENDS.items():
            data = data.replace(raw, escape)
    return data


def _error_event(error: Exception) -> bytes:
    _, body = error_body(error)
    return event(body)


class EventStream(Response):
    """Server-sent events. Releases the request's permits when it ends, however it ends.

    The status goes out with the first event: a request that is refused before (its adapter can't
    be read, or was unloaded on the way) gets its 4xx like one that is not streamed. A request that
    waits longer than KEEP_ALIVE_S gets the status 200, and signs of life until its first event
    comes. An error is then an event of the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        permits: Permits,
        last_words: Callable[[Exception], bytes] = _error_event,
        sign_of_life: Callable[[], bytes] = lambda: COMMENT,
    ) -> None:
        """`last_words`: what a stream says that fails when its status has long been sent.
        `sign_of_life`: what it says while nothing comes."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._permits = permits
        self._last_words = last_words
        self._sign_of_life = sign_of_life
        # Proxies must pass each event on at once.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._permits:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            outlet = _Outlet(send, start, scope.get(WRITER))
            failure = await _unless_disconnected(
                receive, self._send_events(outlet), partial(outlet.keep_alive, self._sign_of_life)
            )
            if failure is not None:
                await error_response(failure, scope["path"])(scope, receive, send)

    async def _send_events(self, outlet: _Outlet) -> Exception | None:
        """Why there is no stream, if it failed before anything was sent."""
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await outlet.write(data)
            except Exception as error:
                if not isinstance(error, ManyrootsError):
                    logger.exception("a stream failed")
                if await outlet.withdraw():
                    return error
                # The status is long sent: the stream itself must say it.
                await outlet.write(self._last_words(error))
        await outlet.end()
        return None


class _Outlet:
    """Where a stream's events go: the first the usual way, later ones by the `writer`, where
    the connection has one. Two tasks send: `keep_alive` belongs to the one that waits."""

    def __init__(self, send: Send, start: Message, writer: ChunkWriter | None) -> None:
        self._send, self._start, self._writer = send, start, writer
        self._has_begun = self._has_ended = False
        self._is_quiet = True
        """Nothing was sent since the last `keep_alive`."""
        self._lock = asyncio.Lock()
        """Held while the response begins or ends, and for signs of life."""

    async def write(self, data: bytes) -> None:
        self._is_quiet = False
        if self._has_begun and self._writer is not None and data:
            await self._writer.write(data)
            return
        async with self._lock:
            await self._send_piece(data)

    async def keep_alive(self, sign_of_life: Callable[[], bytes]) -> None:
        """Send a sign of life if nothing else was sent for a while."""
        async with self._lock:
            if self._is_quiet and not self._has_ended:
                await self._send_piece(sign_of_life())
        self._is_quiet = True

    async def withdraw(self) -> bool:
        """Send nothing at all, if nothing was sent yet; whether that is so."""
        async with self._lock:
            self._has_ended = not self._has_begun
            return self._has_ended

    async def end(self) -> None:
        async with self._lock:
            self._has_ended = True
            await self._send_piece(b"", is_last=True)

    async def _send_piece(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            await self._send(self._start)
            self._has_begun = True
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def answer(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The work's result as JSON; if the client goes away meanwhile, the work is cancelled."""
    result = await _unless_disconnected(request.receive, work)
    if result is None:
        return Response(status_code=499)  # never read; nginx' number for this
    return json_response(result)


def json_response(value: msgspec.Struct) -> Response:
    return Response(encode(value), media_type="application/json")


async def _unless_disconnected(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> T | None:
    """The result of `work`, or None if the client went away first. Calls `meanwhile` every
    KEEP_ALIVE_S."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    timeout_s = None if meanwhile is None else KEEP_ALIVE_S
    try:
        while True:
            done, _ = await asyncio.wait(
                {task, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return task.result() if task.done() else None
            assert meanwhile is not None
            await meanwhile()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone. The body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
