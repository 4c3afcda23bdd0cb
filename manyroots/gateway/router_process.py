"""The router's side of several gateways: all replicas, for processes that talk HTTP.

Each gateway has a connection. It submits requests and gets their outputs, as from one engine. If a
gateway goes away, its requests are aborted. A load returns when every gateway knows the name, so
the next request finds it at any of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from manyroots.engine.client import NO_COUNTS, PauseMode
from manyroots.engine.wire import MessageKind, SubmitReader, decode, encode
from manyroots.errors import ManyrootsError, NotFoundError, RequestError, UnavailableError
from manyroots.gateway.frames import FrameStream
from manyroots.gateway.orders import (
    Fleet,
    LinkKind,
    Lost,
    NamedAdapter,
    Names,
    Order,
    OrderKind,
    Unseen,
    decode_link,
    encode_link,
)
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.gateway.session import current_session
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import (
    Abort,
    Batch,
    ControlReply,
    ErrorKind,
    LoadLora,
    LoadTime,
    LoraReply,
    Output,
    Stats,
    StepOutputs,
    Submit,
    UnloadLora,
)
from manyroots.snapshot import SnapshotAsk

logger = logging.getLogger("manyroots")

FLEET_S = 0.1
"""Between looks at whether something has changed that gateways should know."""


async def run_router(
    replicas: ReplicaSet, path: str, orders: int, on_ready: Callable[[], None]
) -> int:
    """The router's whole life: until `orders`, a pipe, says stop. Gives the exit code."""
    stop = asyncio.Event()

    def take_order() -> None:
        if not os.read(orders, 64):
            os._exit(1)  # the parent is gone, and with it what could stop this process
        stop.set()

    asyncio.get_running_loop().add_reader(orders, take_order)
    Path(path).unlink(missing_ok=True)  # of a router that was killed
    serving = asyncio.create_task(RouterServer(replicas).run(path, on_ready))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return 0
    except ManyrootsError as error:
        print(f"manyroots: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)
        await replicas.close()


class _Gateway:
    """One connection, and what is to be sent over it."""

    def __init__(self, stream: FrameStream) -> None:
        self.stream = stream
        self.submits = SubmitReader()
        self.tasks: dict[RequestId, asyncio.Task[None]] = {}
        self.outputs: list[Output] = []
        self.replies: list[LoraReply] = []
        self.loads: list[LoadTime] = []
        self.controls: list[ControlReply] = []
        self.is_flushing = False
        self.acks: dict[int, asyncio.Event] = {}

    def send(self, kind: MessageKind, body: object) -> None:
        self.stream.send(encode(kind, body))

    def tell(self, kind: LinkKind, body: object) -> None:
        self.stream.send(encode_link(kind, body))

    def flush(self, stats: Stats) -> None:
        """Send what has come together, as one batch."""
        self.is_flushing = False
        batch = Batch(StepOutputs(self.outputs), stats, self.replies, self.loads, self.controls)
        self.outputs, self.replies, self.loads, self.controls = [], [], [], []
        self.send(MessageKind.BATCH, batch)


class RouterServer:
    """Serves all replicas to gateways."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._gateways: set[_Gateway] = set()
        self._owners: dict[RequestId, _Gateway] = {}
        self._is_ready = asyncio.Event()
        self._unloaded: set[AdapterName] = set()
        """Names that gateways may know from flags or another router, and that do not serve. Those
        that do are in the replicas' table."""
        self._changing = asyncio.Lock()
        """Held while a name changes: all gateways see one order."""
        self._numbers = itertools.count(1)
        self._work: set[asyncio.Task[None]] = set()
        self._fleet: Fleet | None = None
        replicas.watch(self)

    async def run(self, path: str, on_ready: Callable[[], None]) -> None:
        """Start the replicas and serve until cancelled, or until they are dead for good."""
        server = await FrameStream.listen(path, self._connected)
        try:
            await self._replicas.start()
            self._tell_fleet()
            self._is_ready.set()
            on_ready()
            while not self._replicas.is_over:
                await asyncio.sleep(FLEET_S)
                self._tell_fleet()
            raise UnavailableError(f"giving up: {await self._replicas.wait_until_over()}")
        finally:
            server.close()
            for gateway in self._gateways:
                gateway.stream.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gateway = _Gateway(FrameStream(reader, writer))
        await self._is_ready.wait()
        async with self._changing:
            self._gateways.add(gateway)
            named = [
                NamedAdapter(known.source, known.path)
                for known in self._replicas.adapters
                if isinstance(known.source, LoadLora)
            ]
            gateway.tell(LinkKind.NAMES, Names(0, named, list(self._unloaded)))
        gateway.tell(LinkKind.FLEET, self._fleet)
        gateway.send(MessageKind.READY, self._replicas.info)
        try:
            while (frames := await gateway.stream.receive()) is not None:
                self._take(gateway, frames)
        finally:
            self._gateways.discard(gateway)
            for task in gateway.tasks.values():
                task.cancel()
            for ack in gateway.acks.values():
                ack.set()
            gateway.stream.close()

    def _take(self, gateway: _Gateway, frames: list[bytes]) -> None:
        if frames[0] == MessageKind.SUBMIT.value:
            *frames, session = frames
            submit = gateway.submits.decode(frames)
            task = asyncio.create_task(self._generate(gateway, submit, session.decode() or None))
            gateway.tasks[submit.request_id] = task
            return
        notice = decode_link(frames)
        match decode(frames)[1] if notice is None else notice:
            case int(number):
                if (ack := gateway.acks.get(number)) is not None:
                    ack.set()
            case Order() as order:
                self._begin(self._obey(gateway, order))
            case Abort(request_ids):
                for request_id in request_ids:
                    self._abort(gateway, request_id)
            case LoadLora() as load:
                self._begin(self._load(gateway, load))
            case UnloadLora() as unload:
                self._begin(self._unload(gateway, unload))
            case SnapshotAsk() as ask:
                self._begin(self._look(gateway, ask))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # Requests

    async def _generate(self, gateway: _Gateway, submit: Submit, session: str | None) -> None:
        current_session.set(session)
        self._owners[submit.request_id] = gateway
        try:
            given = cast("AsyncGenerator[Output, None]", self._replicas.generate(submit))
            async with aclosing(given) as outputs:
                async for output in outputs:
                    gateway.outputs.append(output)
                    self._flush_soon(gateway)
        except ManyrootsError as error:
            gateway.tell(LinkKind.LOST, Lost(submit.request_id, str(error)))
        finally:
            self._owners.pop(submit.request_id, None)
            gateway.tasks.pop(submit.request_id, None)

    def _abort(self, gateway: _Gateway, request_id: RequestId) -> None:
        if not self._replicas.abort(request_id) and (task := gateway.tasks.get(request_id)):
            task.cancel()  # it waits for a replica

    def _flush_soon(self, gateway: _Gateway) -> None:
        if not gateway.is_flushing:
            gateway.is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush, gateway)

    def _flush(self, gateway: _Gateway) -> None:
        stats = None if self._fleet is None else self._fleet.stats
        gateway.flush(stats or NO_COUNTS)

    # What engines tell

    def begun(self, request_id: RequestId) -> None:
        if (gateway := self._owners.get(request_id)) is not None:
            gateway.send(MessageKind.BEGUN, [request_id])

    def loaded(self, load: LoadTime) -> None:
        for gateway in self._gateways:
            gateway.loads.append(load)
            self._flush_soon(gateway)

    def stepped(self, stats: Stats) -> None:
        """Counts go with the fleet."""

    def _tell_fleet(self) -> None:
        replicas = self._replicas
        fleet = Fleet(
            replicas.replicas,
            replicas.stats,
            replicas.is_alive,
            replicas.is_paused,
            replicas.is_asleep,
            replicas.num_restarts,
            replicas.num_rerouted,
        )
        if fleet != self._fleet:
            self._fleet = fleet
            for gateway in self._gateways:
                gateway.tell(LinkKind.FLEET, fleet)

    # What gateways ask

    async def _look(self, gateway: _Gateway, ask: SnapshotAsk) -> None:
        try:
            seen = await self._replicas.look(
                since_step=ask.since_step, wants_tree=ask.wants_tree, explain_step=ask.explain_step
            )
        except UnavailableError as error:
            gateway.tell(LinkKind.UNSEEN, Unseen(ask.op_id, str(error)))
            return
        gateway.send(MessageKind.SEEN, replace(seen, op_id=ask.op_id))

    async def _load(self, gateway: _Gateway, load: LoadLora) -> None:
        async with self._changing:
            try:
                reply = await self._replicas.load_adapter(load)
                self._unloaded.discard(load.name)
                await self._tell_names([NamedAdapter(load, reply.path)], [])
            except ManyrootsError as error:
                reply = LoraReply(load.op_id, error=str(error), error_kind=_kind(error))
        gateway.replies.append(replace(reply, op_id=load.op_id))
        self._flush_soon(gateway)

    async def _unload(self, gateway: _Gateway, unload: UnloadLora) -> None:
        async with self._changing:
            try:
                reply = await self._replicas.unload_adapter(unload.name)
                self._unloaded.add(unload.name)
                await self._tell_names([], [unload.name])
            except ManyrootsError as error:
                reply = LoraReply(unload.op_id, error=str(error), error_kind=_kind(error))
        gateway.replies.append(replace(reply, op_id=unload.op_id))
        self._flush_soon(gateway)

    async def _tell_names(self, added: list[NamedAdapter], removed: list[AdapterName]) -> None:
        """Return when every gateway knows what these names mean now, or is gone."""
        number = next(self._numbers)
        change, asked = Names(number, added, removed), []
        for gateway in self._gateways:
            ack = gateway.acks[number] = asyncio.Event()
            gateway.tell(LinkKind.NAMES, change)
            asked.append((gateway, ack))
        for gateway, ack in asked:
            await ack.wait()
            del gateway.acks[number]

    async def _obey(self, gateway: _Gateway, order: Order) -> None:
        replicas, reply = self._replicas, ControlReply(order.op_id)
        try:
            match order.kind:
                case OrderKind.RESET_CACHE:
                    reply = await replicas.reset_cache()
                case OrderKind.PAUSE:
                    await replicas.pause(PauseMode(order.argument))
                case OrderKind.RESUME:
                    await replicas.resume()
                case OrderKind.UPDATE_WEIGHTS:
                    reply = await replicas.update_weights(order.argument)
                case OrderKind.SLEEP:
                    await replicas.sleep(PauseMode(order.argument))
                case OrderKind.WAKE:
                    await replicas.wake()
                case OrderKind.RESTART:
                    await replicas.restart()
        except ManyrootsError as error:
            reply = ControlReply(order.op_id, error=str(error), error_kind=_kind(error))
        self._tell_fleet()
        gateway.controls.append(replace(reply, op_id=order.op_id))
        self._flush_soon(gateway)


def _kind(error: ManyrootsError) -> ErrorKind:
    match error:
        case NotFoundError():
            return ErrorKind.NOT_FOUND
        case RequestError():
            return ErrorKind.REQUEST
        case UnavailableError():
            return ErrorKind.UNAVAILABLE
    return ErrorKind.ENGINE
