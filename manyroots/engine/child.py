"""One engine process, from its start to its end.

Starts the process, passes messages both ways and reports why it ended. The reason comes from its
last message, its exit code or the signal that killed it, with its last log lines. Knows nothing of
requests. Passes the process's stderr on to ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import zmq
import zmq.asyncio

from manyroots.config import EngineSettings
from manyroots.engine.wire import MessageKind, SubmitWriter, decode, encode
from manyroots.errors import ModelError, UnavailableError
from manyroots.messages import EngineInfo, Submit
from manyroots.process.progress import Progress
from manyroots.process.torch_allocator import engine_environment

logger = logging.getLogger("manyroots")

CLOSE_TIMEOUT_S = 5.0
_LAST_WORDS_S = 0.5
"""How long lines of a dead process may still arrive."""
_NUM_LAST_LINES = 20


class StartedProcess(Protocol):
    """An engine's process, seen from its parent."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class Child:
    """Owns one process, its socket and, until they are connected, the socket's folder."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: additional environment variables of the process."""
        self._environment = dict(environment or {})
        # A private folder, so that no other user of the machine can reach the socket.
        self._folder = tempfile.TemporaryDirectory(prefix="manyroots-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # Never full: sending to a living process does not wait for it.
        self._socket.set(zmq.SNDHWM, 0)
        self._process: StartedProcess | None = None
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._submits = SubmitWriter()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    async def start(
        self, settings: EngineSettings, on_progress: Callable[[Progress], None]
    ) -> EngineInfo:
        """Returns when it can serve; raises the reason if it cannot start."""
        self._process = await self._launch()
        greeting = asyncio.create_task(self._greet(settings, on_progress))
        try:
            await self._unless_it_ends(greeting)
            if greeting.done():
                return greeting.result()
        finally:
            greeting.cancel()
        raise UnavailableError(f"{self.cause()} while loading{self._quoted_lines()}")

    async def _launch(self) -> StartedProcess:
        """Bind the socket, and start a process that connects to it."""
        address = f"ipc://{self._folder.name}/engine"
        self._socket.bind(address)
        # A separate session, so that Ctrl-C in a terminal reaches only the server, which drains.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "manyroots.engine.process", address, str(time.monotonic()),
            stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, env={**engine_environment(), **self._environment},
        )  # fmt: skip
        assert process.stderr is not None
        self._reader = asyncio.create_task(self._pass_lines_on(process.stderr))
        return process

    async def _greet(
        self, settings: EngineSettings, on_progress: Callable[[Progress], None]
    ) -> EngineInfo:
        await self._socket.send_multipart(encode(MessageKind.SETTINGS, settings))
        while True:
            kind, body = await self.receive()
            # It has connected, and no other process may. The folder is removed now, so that a
            # killed server leaves none.
            self._folder.cleanup()
            match kind:
                case MessageKind.PROGRESS:
                    on_progress(body)
                case MessageKind.FAILED:
                    raise ModelError(body)
                case _:
                    assert kind is MessageKind.READY
                    assert isinstance(body, EngineInfo)
                    return body

    def send(self, kind: MessageKind, body: object) -> None:
        """Send a message. A message to an ended process is lost; its end is reported separately.
        One to a process that has not connected yet waits after its settings."""
        frames = self._submits.encode(body) if isinstance(body, Submit) else encode(kind, body)
        # Through asyncio's socket, which must see every call; done when it returns, if connected.
        sent = cast(
            "asyncio.Future[object]", self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        )
        if sent.done() and not isinstance(sent.exception(), zmq.Again):
            sent.result()

    async def receive(self) -> tuple[MessageKind, Any]:
        kind, body = decode(await self._socket.recv_multipart())
        if kind is MessageKind.FAILED:
            # It stays until it knows that this message arrived.
            self.send(MessageKind.CLOSE, None)
        return kind, body

    async def live(self, take: Callable[[MessageKind, Any], None]) -> str:
        """Pass messages to `take` until the process ends; returns the reason. A process whose
        message cannot be handled is ended, because later ones would be lost."""
        receiving = asyncio.create_task(self._receive_all(take))
        try:
            await self._unless_it_ends(receiving)
            if receiving.done() and (error := receiving.exception()) is not None:
                logger.error("a message of the engine can't be taken", exc_info=error)
                self._failure = f"its message can't be taken: {type(error).__name__}: {error}"
                self.send(MessageKind.CLOSE, None)
            await self._end()
        finally:
            receiving.cancel()
        return self.cause()

    async def _receive_all(self, take: Callable[[MessageKind, Any], None]) -> None:
        while True:
            kind, body = await self.receive()
            if kind is MessageKind.FAILED:
                self._failure = str(body)
                return
            take(kind, body)

    async def _unless_it_ends(self, work: asyncio.Task[Any]) -> None:
        """Wait for `work`, or for the process's end and its last messages."""
        assert self._process is not None
        end = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                more = {work} if self._reader is None else {work, self._reader}
                await asyncio.wait(more, timeout=_LAST_WORDS_S,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        finally:
            end.cancel()

    def cause(self) -> str:
        """The reason of its end, in words."""
        if self._failure is not None:
            return f"the engine died: {self._failure}"
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (the machine may be out of memory)" if -code == signal.SIGKILL else ""
            return f"the engine process was killed by {name}{hint}"
        return f"the engine process ended with code {code}"

    def _quoted_lines(self) -> str:
        return "".join(f"\n    {line}" for line in self._lines)

    async def _pass_lines_on(self, stderr: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stderr.read(65536):
            with contextlib.suppress(OSError, ValueError):  # our stderr has no reader any more
                sys.stderr.write(data.decode(errors="replace"))
                sys.stderr.flush()
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-4096:]
            self._lines.extend(line.decode(errors="replace")[:500] for line in lines if line)

    async def close(self) -> None:
        """End the process; first ask it, then kill it."""
        if self._process is not None and self._process.returncode is None:
            self.send(MessageKind.CLOSE, None)
            await self._end()
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_LAST_WORDS_S)
            self._reader.cancel()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    async def _end(self) -> None:
        assert self._process is not None
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
