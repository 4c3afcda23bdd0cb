"""The wire to another machine: only an end with the shared key can connect."""

from __future__ import annotations

import pytest
import zmq

from manyroots.engine.wire_key import secure


@pytest.mark.parametrize(("key", "is_heard"), [("shared", True), ("other", False), (None, False)])
def test_r05_m01_only_an_end_with_the_shared_key_is_heard(key: str | None, is_heard: bool) -> None:
    context = zmq.Context()
    gateway: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    engine: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    try:
        secure(gateway, "shared", is_gateway=True)
        port = gateway.bind_to_random_port("tcp://127.0.0.1")
        if key is not None:
            secure(engine, key, is_gateway=False)
        engine.connect(f"tcp://127.0.0.1:{port}")
        engine.send(b"hello")
        assert bool(gateway.poll(5000 if is_heard else 500)) == is_heard
    finally:
        gateway.close(linger=0)
        engine.close(linger=0)
        context.term()
