"""Why an engine died is told, however late its last message is read (R07)."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, cast

import zmq

from manyroots.config import engine_settings
from manyroots.engine.child import Child
from manyroots.engine.process import Socket, _serve
from manyroots.engine.wire import MessageKind, decode, encode
from manyroots.ids import RequestId
from manyroots.messages import Abort
from tests.helpers.patience import PATIENCE_S


class Wire:
    """The engine's end: gives messages one by one, and keeps what is sent."""

    def __init__(self, *messages: tuple[MessageKind, Any]) -> None:
        self.left = deque(messages)
        self.sent: list[tuple[MessageKind, Any]] = []

    def recv_multipart(self) -> list[bytes]:
        return encode(*self.left.popleft())

    def send_multipart(self, frames: list[bytes]) -> None:
        self.sent.append(decode(frames))


def test_r07_an_engine_that_failed_stays_until_its_last_message_is_heard(tmp_path: Path) -> None:
    """R07: else its end may be seen first, and the reason is lost."""
    nowhere = engine_settings({"model": str(tmp_path / "nowhere")})
    late = Abort([RequestId(7)])
    wire = Wire(
        (MessageKind.SETTINGS, nowhere), (MessageKind.ABORT, late), (MessageKind.CLOSE, None)
    )
    assert _serve(cast(Socket, wire), 0.0, 0.0) == 1
    assert not wire.left
    kind, reason = wire.sent[-1]
    assert kind is MessageKind.FAILED
    assert "nowhere" in reason


def test_r07_a_failure_that_was_heard_lets_the_engine_go() -> None:
    """R07."""

    async def hear() -> tuple[MessageKind, Any]:
        child = Child()
        address = f"ipc://{child._folder.name}/engine"
        child._socket.bind(address)
        with zmq.Context() as context, context.socket(zmq.PAIR) as engine:
            engine.connect(address)
            engine.send_multipart(encode(MessageKind.FAILED, "no memory"))
            heard = await asyncio.wait_for(child.receive(), PATIENCE_S)
            assert heard == (MessageKind.FAILED, "no memory")
            assert await asyncio.to_thread(engine.poll, int(PATIENCE_S * 1000))
            answer = decode(engine.recv_multipart())
            await child.close()
        return answer

    assert asyncio.run(hear()) == (MessageKind.CLOSE, None)
