"""All replicas as a gateway sees them: `EngineClient` over a connection to the router's process.

The router owns the engines (`router_process.py`). If it dies, requests that have streamed nothing
wait for its successor; those that have streamed end with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from manyroots.config import EngineSettings
from manyroots.engine.client import EngineDiedError, PauseMode
from manyroots.engine.process_client import POLL_S, ProcessClient
from manyroots.engine.wire import MessageKind, SubmitWriter, decode, encode
from manyroots.errors import ManyrootsError, UnavailableError
from manyroots.gateway.frames import FrameStream
from manyroots.gateway.orders import (
    Fleet,
    LinkKind,
    Lost,
    Names,
    Order,
    OrderKind,
    Unseen,
    decode_link,
    encode_link,
)
from manyroots.gateway.replica_set import MAX_BEGUN_ATTEMPTS
from manyroots.gateway.session import current_session
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    Abort,
    ControlReply,
    EngineInfo,
    LoadLora,
    Output,
    Stats,
    Submit,
    UnloadLora,
)
from manyroots.process.progress import Progress
from manyroots.snapshot import ReplicaView

logger = logging.getLogger("manyroots")

ROUTER_WAIT_S = 120.0
"""That a request without outputs waits for a router: its successor starts all engines."""
_MAX_RECONNECTS = 1000
_ID_BITS = 30
"""Requests of one gateway; above them is its pid, so that no two gateways use one number. Below
2**53 in all, which a browser can still count."""


class RouterLink:
    """One connection to the router, as `ProcessClient` sees an engine's process."""

    def __init__(self, path: str, on_notice: Callable[[RouterLink, Any], None]) -> None:
        """`on_notice`: told what is no message of an engine, and None when the router is gone."""
        self._path = path
        self._on_notice = on_notice
        self._stream: FrameStream | None = None
        self._submits = SubmitWriter()
        self.pid: int | None = None
        self.last_lines: list[str] = []

    async def start(
        self, settings: EngineSettings, on_progress: Callable[[Progress], None]
    ) -> EngineInfo:
        """Return when the replicas serve. Waits for a router: the server ends if there is none."""
        while True:
            while self._stream is None:
                try:
                    self._stream = await FrameStream.connect(self._path)
                except OSError:
                    await asyncio.sleep(POLL_S)
            while (frames := await self._stream.receive()) is not None:
                if not self._is_notice(frames):
                    kind, body = decode(frames)
                    assert kind is MessageKind.READY
                    assert isinstance(body, EngineInfo)
                    return body
            self._stream.close()
            self._stream = None

    def send(self, kind: MessageKind | LinkKind, body: object) -> None:
        assert self._stream is not None
        if isinstance(body, Submit):
            session = (current_session.get() or "").encode()
            self._stream.send([*self._submits.encode(body), session])
        elif isinstance(kind, LinkKind):
            self._stream.send(encode_link(kind, body))
        else:
            self._stream.send(encode(kind, body))

    async def live(self, take: Callable[[MessageKind, Any], None]) -> str:
        """Pass messages on until the router is gone; gives why."""
        assert self._stream is not None
        while (frames := await self._stream.receive()) is not None:
            if not self._is_notice(frames):
                take(*decode(frames))
        self._on_notice(self, None)
        return "the router process is gone"

    def _is_notice(self, frames: list[bytes]) -> bool:
        notice = decode_link(frames)
        if notice is not None:
            self._on_notice(self, notice)
        return notice is not None

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class RouterClient(ProcessClient):
    """Owns a gateway's connection to the router, and its successors."""

    def __init__(self, settings: EngineSettings, path: str) -> None:
        super().__init__(
            settings,
            max_restarts=_MAX_RECONNECTS,
            first_pause_s=0.0,
            make_child=self._make_link,  # type: ignore[arg-type]
            hands_back=True,
        )
        self._path = path
        self._ids = itertools.count((os.getpid() << _ID_BITS) + 1)
        self._fleet: Fleet | None = None
        self._unloaded: set[AdapterName] = set()
        """Names that a router has unloaded; the others are in the table."""
        self._told: set[AdapterName] = set()
        """Names that the current router has told of."""

    def _make_link(self) -> RouterLink:
        return RouterLink(self._path, self._take_notice)

    # How the replicas are, as the router tells

    @property
    def is_alive(self) -> bool:
        return self._is_serving and (self._fleet is None or self._fleet.is_alive)

    @property
    def stats(self) -> Stats | None:
        return None if self._fleet is None else self._fleet.stats

    @property
    def is_paused(self) -> bool:
        return self._fleet is not None and self._fleet.is_paused

    @property
    def replicas(self) -> list[ReplicaView]:
        return [] if self._fleet is None else self._fleet.replicas

    @property
    def num_rerouted(self) -> int:
        return 0 if self._fleet is None else self._fleet.num_rerouted

    @property
    def _loads_first(self) -> bool:
        return False  # the router's replicas have them

    def _take_notice(self, link: RouterLink, notice: Any) -> None:
        match notice:
            case None:
                self._fleet, self.is_asleep = None, False
            case Fleet():
                self._fleet = notice
                self.is_asleep, self.num_restarts = notice.is_asleep, notice.num_restarts
            case Lost():
                if (mine := self._requests.pop(notice.request_id, None)) is not None:
                    mine.outputs.put(UnavailableError(notice.reason))
            case Unseen():
                self._answer(notice.op_id, None, UnavailableError(notice.reason))
            case Names():
                if notice.number == 0:  # a router's first, whatever another one had
                    self._told.clear()
                for named in notice.added:
                    self._unloaded.discard(named.load.name)
                    self.adapters.loaded(named.load, named.path)
                for name in notice.removed:
                    self._unloaded.add(name)
                    self.adapters.forget(name)
                self._told.update(notice.removed, (named.load.name for named in notice.added))
                link.send(LinkKind.HEARD, notice.number)

    async def _resume(self, child: Any, *, is_first: bool) -> None:
        """Tell a new router what was loaded and unloaded before it."""
        if is_first:
            return
        changes: list[LoadLora | UnloadLora] = [UnloadLora(0, name) for name in self._unloaded]
        changes += [
            replace(load, in_place=True)
            for load in self.adapters.loads
            if load.name not in self._unloaded
        ]
        for change in changes:
            if change.name in self._told:  # by another gateway, meanwhile
                continue
            kind = MessageKind.LOAD if isinstance(change, LoadLora) else MessageKind.UNLOAD
            try:
                await self._ask(kind, change, child)
            except ManyrootsError as error:
                logger.error("adapter %s could not be loaded again: %s", change.name, error)
        self._set_serving(True)

    # Requests

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        num_begun = 0
        while True:
            has_streamed = False
            await self._until_serving()
            try:
                given = cast("AsyncGenerator[Output, None]", super().generate(request))
                async with aclosing(given) as outputs:
                    async for output in outputs:
                        has_streamed = True
                        yield output
                return
            except EngineDiedError as error:
                num_begun += error.has_begun
                if has_streamed or num_begun >= MAX_BEGUN_ATTEMPTS or self.is_over:
                    raise

    async def _until_serving(self) -> None:
        end_s = time.monotonic() + ROUTER_WAIT_S
        while not self._is_serving and not self.is_over and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)

    def abort(self, request_id: RequestId) -> bool:
        """Of any gateway's requests: the router knows them."""
        if not self._is_serving:
            return False
        self._serving_child().send(MessageKind.ABORT, Abort([request_id]))
        return True

    # All replicas at once

    async def _order(self, kind: OrderKind, argument: str = "") -> ControlReply:
        return cast("ControlReply", await self._ask(LinkKind.ORDER, Order(0, kind, argument)))

    async def reset_cache(self) -> ControlReply:
        return await self._order(OrderKind.RESET_CACHE)

    async def pause(self, mode: PauseMode) -> None:
        await self._order(OrderKind.PAUSE, mode.value)

    async def resume(self) -> None:
        await self._order(OrderKind.RESUME)

    async def update_weights(self, path: str) -> ControlReply:
        return await self._order(OrderKind.UPDATE_WEIGHTS, path)

    async def sleep(self, mode: PauseMode) -> None:
        await self._order(OrderKind.SLEEP, mode.value)

    async def wake(self) -> None:
        await self._order(OrderKind.WAKE)

    async def restart(self) -> int:
        """Renew all replicas, one after the other; gives how many."""
        await self._order(OrderKind.RESTART)
        return len(self.replicas)
