"""Connections that may not take for ever: a request that is half sent is given up after a while.

uvicorn waits without end for the rest of headers or of a body, so that a client that opens many and
sends a byte now and then (slowloris) could hold them all. Here one deadline counts from a
request's first byte, or from the opening of a connection, to the request's last byte.

And a short way out: a stream's events are chunks that need none of what a message passes through on
its way from the application to the socket (see `ChunkWriter`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
import msgspec
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from manyroots.api.errors import error_body

WRITER = "manyroots.writer"
"""Where a request's scope has its `ChunkWriter`, if there is one."""


class ChunkWriter:
    """Writes further pieces of a response that has begun and comes in chunks.

    What uvicorn, h11 and the middleware would write, without them: they are a sixth of what a
    stream's token costs. The response's beginning and end go through them.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport

    async def write(self, data: bytes) -> None:
        """`data` must not be empty, which would end the response."""
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        # A write that fails closes the transport; the cycle learns of it in the loop's next round.
        if not self._cycle.disconnected and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def timed_protocol(timeout_s: float, count: Callable[[str], None]) -> type[H11Protocol]:
    """A protocol for uvicorn. `count` is told `headers` or `body` for each that is given up."""

    class Timed(_TimedProtocol):
        _timeout_s = timeout_s
        _count = staticmethod(count)

    return Timed


class _TimedProtocol(H11Protocol):
    _timeout_s: float
    _count: Callable[[str], None]
    _deadline: asyncio.TimerHandle | None = None
    _has_data = False
    """Of the request that is being read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._has_data = True
        self._watch()
        super().data_received(data)
        if self.cycle is not None:
            self._offer_writer(self.cycle)
        self._settle()

    def _offer_writer(self, cycle: RequestResponseCycle) -> None:
        """Its task has not begun yet. Older clients can't be sent chunks."""
        scope = cast(dict[str, Any], cycle.scope)
        if not cycle.response_started and scope["http_version"] == "1.1":
            scope.setdefault(WRITER, ChunkWriter(cycle))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may have come with this one, in part.
        if self.conn.trailing_data[0]:
            self._has_data = True
            self._watch()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._timeout_s, self._give_up)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _settle(self) -> None:
        """Nothing is waited for if a request is whole, or none has begun after an answered one."""
        is_between = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if is_between or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()
            self._has_data = False

    def _give_up(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._has_data:
            self._count("headers" if self.conn.their_state is h11.IDLE else "body")
        if self.cycle is not None and not self.cycle.response_complete:
            # A handler that waits for the rest learns that there is none.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._has_data and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_408()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an answer like every other error, if one can still be sent."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            why = f"The request is no HTTP/1.1: {sys.exception() or msg}"
            self._send_error(HTTPException(400, f"{why.rstrip('.')}; send HTTP/1.1 to this port."))
        self.transport.close()

    def _send_408(self) -> None:
        self._send_error(
            HTTPException(
                408, f"The request was not whole after {self._timeout_s:g} s; send it faster."
            )
        )

    def _send_error(self, error: HTTPException) -> None:
        body = msgspec.json.encode(error_body(error)[1])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(
                status_code=error.status_code,
                headers=headers,
                reason=HTTPStatus(error.status_code).phrase.encode(),
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
