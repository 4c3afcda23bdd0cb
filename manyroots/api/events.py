"""Responses that last: server-sent events, and answers that a client may stop waiting for.

Takes an async generator of chunks, or a coroutine; gives responses. In both a client that goes
away ends the work at once, which aborts its sequences and frees their pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manyroots.api.concurrency import Permits
from manyroots.api.connections import WRITER, ChunkWriter
from manyroots.api.errors import error_body, error_response
from manyroots.errors import ManyrootsError

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


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
    be read, or was unloaded on the way) gets its 4xx like one that is not streamed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        permits: Permits,
        last_words: Callable[[Exception], bytes] = _error_event,
    ) -> None:
        """`last_words`: what a stream says that fails when its status has long been sent."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._permits = permits
        self._last_words = last_words
        # Proxies must pass each event on at once.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._permits:
            writer: ChunkWriter | None = scope.get(WRITER)
            failure = await _unless_disconnected(receive, self._send_events(send, writer))
            if failure is not None:
                await error_response(failure, scope["path"])(scope, receive, send)

    async def _send_events(self, send: Send, writer: ChunkWriter | None) -> Exception | None:
        """Why there is no stream, if it failed before its first event. The first event goes the
        usual way; later ones by the `writer`, where the connection has one."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        has_begun = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if has_begun and writer is not None and data:
                        await writer.write(data)
                        continue
                    if not has_begun:
                        has_begun = True
                        await send(start)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not isinstance(error, ManyrootsError):
                    logger.exception("a stream failed")
                if not has_begun:
                    return error
                # The status is long sent: the stream itself must say it.
                last = self._last_words(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


async def answer(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The work's result as JSON; if the client goes away meanwhile, the work is cancelled."""
    result = await _unless_disconnected(request.receive, work)
    if result is None:
        return Response(status_code=499)  # never read; nginx' number for this
    return json_response(result)


def json_response(value: msgspec.Struct) -> Response:
    return Response(encode(value), media_type="application/json")


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client went away first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone. The body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
