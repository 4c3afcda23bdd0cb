"""The engine process' loop: it sleeps when there is nothing to do, and wakes when a read ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from manyroots.engine.process import run
from manyroots.engine.wire import MessageKind, SubmitWriter, decode, encode
from manyroots.ids import AdapterName
from manyroots.messages import Batch, LoadLora, UnloadLora
from tests.helpers.patience import PATIENCE_S
from tests.helpers.scheduler_harness import submit
from tests.unit.engine.directory import Directory, expected


class Engine:
    """`run` on a thread, spoken to through its socket."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._submits = SubmitWriter()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.bind("inproc://engine")
        self._other = self._context.socket(zmq.PAIR)
        self._other.connect("inproc://engine")
        self.thread = threading.Thread(target=run, args=(self._other, directory.loop))
        self.thread.start()

    def send(self, kind: MessageKind, message: Any) -> None:
        frames = self._submits.encode(message) if kind is MessageKind.SUBMIT else None
        self.socket.send_multipart(frames or encode(kind, message))

    def receive(self) -> Batch:
        assert self.socket.poll(PATIENCE_S * 1000), "the engine says nothing"
        kind, batch = decode(self.socket.recv_multipart())
        if kind is MessageKind.BEGUN:
            return self.receive()
        assert kind is MessageKind.BATCH
        assert isinstance(batch, Batch)
        return batch

    def close(self) -> None:
        self.directory.files.gate.set()
        self.send(MessageKind.CLOSE, None)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.directory.loop.close()
        self._other.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(Directory(tmp_path))
    yield engine
    engine.close()


def test_it_sleeps_while_files_are_read_and_wakes_when_they_are(engine: Engine) -> None:
    """W10: no message is needed to go on, and no step is wasted meanwhile."""
    directory = engine.directory
    path = directory.write("a")
    directory.files.gate.clear()
    engine.send(MessageKind.LOAD, LoadLora(1, AdapterName("a"), path))
    while not directory.files.num_reads:
        time.sleep(0.001)
    num_steps = directory.scheduler.stats().total_steps
    assert not engine.socket.poll(200)
    assert directory.scheduler.stats().total_steps == num_steps
    directory.files.gate.set()
    batch = engine.receive()
    assert [reply.op_id for reply in batch.replies] == [1]
    assert batch.replies[0].error is None
    assert batch.loads


def test_w08_an_idle_process_frees_an_unloaded_adapter_by_itself(engine: Engine) -> None:
    """W08"""
    directory = engine.directory
    request = submit(1, [1, 2, 3, 4, 5], max_tokens=4, adapter="a")
    engine.send(MessageKind.LOAD, LoadLora(1, AdapterName("a"), directory.write("a")))
    engine.receive()
    engine.send(MessageKind.SUBMIT, request)
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += [token for output in engine.receive().outputs for token in output.tokens]
    assert tokens == expected(request, "a")
    engine.send(MessageKind.UNLOAD, UnloadLora(2, AdapterName("a")))
    batch = engine.receive()
    while batch.stats.adapters is None or batch.stats.adapters.num_on_device:
        batch = engine.receive()
    assert batch.stats.num_held_pages == batch.stats.num_cached_pages == 0
