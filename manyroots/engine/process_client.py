"""An engine in another process, as the API sees it.

Gives `EngineClient`. Starts the process, passes messages both ways, and tells every waiting
request at once if the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio

from manyroots.config import EngineSettings
from manyroots.engine.client import lora_error
from manyroots.engine.wire import Kind, decode, encode
from manyroots.errors import ModelError, UnavailableError
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    Abort,
    Batch,
    EngineInfo,
    LoadLora,
    LoadTime,
    LoraReply,
    Output,
    Stats,
    Submit,
    UnloadLora,
)

CLOSE_TIMEOUT_S = 5.0


class ProcessClient:
    """Owns one engine process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._ids = itertools.count(1)
        self._queues: dict[RequestId, asyncio.Queue[Output | None]] = {}
        self._op_ids = itertools.count(1)
        self._ops: dict[int, asyncio.Future[LoraReply]] = {}
        self._watch_load: Callable[[LoadTime], None] = lambda load: None
        self._info: EngineInfo | None = None
        self._stats: Stats | None = None
        self._death: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the engine is still loading; try again in a moment")
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._info is not None and self._death is None

    @property
    def stats(self) -> Stats | None:
        return self._stats

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    async def start(self) -> None:
        # A folder of our own, so that nobody else on the machine can reach the socket.
        self._folder = tempfile.TemporaryDirectory(prefix="manyroots-")
        address = f"ipc://{self._folder.name}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(address)
        # A session of its own, so that Ctrl-C in a terminal reaches only the server, which drains.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "manyroots.engine.process", address,
            stdin=asyncio.subprocess.PIPE, start_new_session=True, env=os.environ,
        )  # fmt: skip
        await self._send(Kind.SETTINGS, self._settings)
        self._info = await self._wait_until_ready()
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch()),
        ]

    async def _wait_until_ready(self) -> EngineInfo:
        assert self._socket is not None
        assert self._process is not None
        answer = asyncio.ensure_future(self._socket.recv_multipart())
        exit_ = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({answer, exit_}, return_when=asyncio.FIRST_COMPLETED)
        exit_.cancel()
        if not answer.done():
            # What it said last may still be on its way.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(answer), 1.0)
        if not answer.done():
            answer.cancel()
            raise UnavailableError(
                f"the engine process ended with code {self._process.returncode} while loading"
            )
        kind, body = decode(answer.result())
        if kind is Kind.FAILED:
            raise ModelError(body)
        assert isinstance(body, EngineInfo)
        return body

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        if not self.is_alive:
            raise UnavailableError(self._death or "the engine is still loading")
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._queues[request.request_id] = queue
        finished = False
        try:
            await self._send(Kind.SUBMIT, request)
            while not finished:
                output = await queue.get()
                if output is None:
                    finished = True
                    raise UnavailableError(self._death or "the engine is closed")
                finished = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(request.request_id, None)
            if not finished and self._death is None:
                await asyncio.shield(self._send(Kind.ABORT, Abort([request.request_id])))

    async def load_adapter(
        self, name: AdapterName, path: str, *, is_pinned: bool, in_place: bool
    ) -> LoraReply:
        load = LoadLora(next(self._op_ids), name, path, is_pinned, in_place)
        return await self._ask(Kind.LOAD, load)

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        return await self._ask(Kind.UNLOAD, UnloadLora(next(self._op_ids), name))

    def watch_loads(self, watch: Callable[[LoadTime], None]) -> None:
        self._watch_load = watch

    async def _ask(self, kind: Kind, message: LoadLora | UnloadLora) -> LoraReply:
        if not self.is_alive:
            raise UnavailableError(self._death or "the engine is still loading")
        answer: asyncio.Future[LoraReply] = asyncio.get_running_loop().create_future()
        self._ops[message.op_id] = answer
        try:
            await self._send(kind, message)
            reply = await answer
        finally:
            del self._ops[message.op_id]
        if error := lora_error(reply):
            raise error
        return reply

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(zmq.ZMQError, asyncio.TimeoutError):
                await asyncio.wait_for(self._send(Kind.CLOSE, None), 1.0)
            try:
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        self._die("the engine is closed")
        if self._socket is not None:
            self._socket.close(linger=0)
        if self._context is not None:
            self._context.term()
        if self._folder is not None:
            self._folder.cleanup()

    async def _send(self, kind: Kind, body: object) -> None:
        assert self._socket is not None
        await self._socket.send_multipart(encode(kind, body))

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            kind, body = decode(await self._socket.recv_multipart())
            if kind is Kind.FAILED:
                self._die(f"the engine died: {body}")
                return
            assert isinstance(body, Batch)
            self._stats = body.stats
            for output in body.news:
                queue = self._queues.get(output.request_id)
                if queue is not None:
                    queue.put_nowait(output)
            for reply in body.replies:
                answer = self._ops.get(reply.op_id)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
            for load in body.loads:
                self._watch_load(load)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self._die(f"the engine process ended with code {code}")

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
        for queue in self._queues.values():
            queue.put_nowait(None)
        for answer in self._ops.values():
            if not answer.done():
                answer.set_exception(UnavailableError(self._death))
