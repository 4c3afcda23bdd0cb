"""Several engines as the API sees one: `EngineClient` over a `ProcessClient` for each replica.

The router chooses the replica of each request. If a replica dies, its requests that have streamed
nothing go to another one; those that have streamed end with the reason. Adapters are loaded on all
replicas before a load returns, and a replica that was down meanwhile loads them before it serves.

Replicas come and go while requests run: `restart` renews one after the other, and the autoscaler
adds and removes some (`scaling.py`). A replica that leaves gets no new requests and ends when its
last one has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from manyroots.engine.adapter_table import AdapterTable
from manyroots.engine.client import NO_COUNTS, EngineDiedError, EngineWatch, PauseMode
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import NotFoundError, RequestError, UnavailableError
from manyroots.gateway.merged import merged_info, merged_stats
from manyroots.gateway.scaling import ScaleOptions, Scaling
from manyroots.gateway.session import current_session
from manyroots.ids import AdapterDigest, AdapterName, Namespace, RequestId
from manyroots.messages import (
    ControlReply,
    EngineInfo,
    LoadLora,
    LoadTime,
    LoraReply,
    Output,
    PageChange,
    Stats,
    Submit,
)
from manyroots.process.progress import Progress
from manyroots.routing.autoscaler import ReplicaLoad
from manyroots.routing.prompt_hashes import PromptHasher
from manyroots.routing.router import ReplicaLimits, Router, RouteRequest, RoutingPolicy
from manyroots.snapshot import ReplicaView, Snapshot

logger = logging.getLogger("manyroots")

MAX_BEGUN_ATTEMPTS = 2
"""Replicas that may die while they compute one request: a request that kills engines must not kill
all of them."""
WAIT_S = 0.05
"""Between looks at whether a replica is up again."""

T = TypeVar("T")

OnLife = Callable[[bool], None]
OnPages = Callable[[list[PageChange]], None]
MakeClient = Callable[[int, OnLife, OnPages], ProcessClient]
"""Makes the client of a replica: its number, what to tell when it begins or ceases to serve, and
what to tell of its pages."""


class ReplicaSet:
    """Owns the clients of all replicas."""

    def __init__(
        self,
        num_replicas: int,
        make_client: MakeClient,
        adapters: AdapterTable,
        *,
        scale: ScaleOptions | None = None,
        policy: RoutingPolicy = RoutingPolicy.EXPECTED_TTFT,
        max_cpu_loras: int = 0,
        silence_s: float = 60.0,
    ) -> None:
        """`adapters`: the table that all clients share. `num_replicas` start at once; with `scale`,
        more are added when they are needed. `silence_s`: a replica with requests that says nothing
        for so long is drained."""
        self.adapters = adapters
        self._policy = policy
        self._max_cpu_loras = max_cpu_loras
        self._silence_s = silence_s
        self._scale = scale
        most = num_replicas if scale is None else scale.max_replicas
        self._clients = [
            make_client(number, self._life_of(number), self._pages_of(number))
            for number in range(most)
        ]
        self._is_member = [number < num_replicas for number in range(most)]
        """Others are not started, or have left."""
        self._is_up = [False] * most
        self._is_drained = [False] * most
        self._is_leaving = [False] * most
        """Gets no new requests, because it is about to end."""
        self._num_given = [0] * most
        self._ids = itertools.count(1)
        self._owners: dict[RequestId, int] = {}
        self._digests: dict[AdapterName, AdapterDigest] = {}
        """What adapters' names mean, as pages and loads have told."""
        self._router: Router | None = None
        self._hasher: PromptHasher | None = None
        self._info: EngineInfo | None = None
        self._changing = asyncio.Lock()
        """Held while adapters are loaded or unloaded, so that all replicas see one order."""
        self._monitors: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[str] | None = None
        self._watches: set[asyncio.Task[None]] = set()
        """Of the members, each until it is dead for good."""
        self._moving = asyncio.Lock()
        """Held while replicas are added, removed or restarted, or are all told one thing."""
        self.num_rerouted = 0
        """Requests that went to another replica because theirs had died."""

    # What the API asks about

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the replicas are still loading; try again in a moment")
        return self._info

    @property
    def is_alive(self) -> bool:
        return any(client.is_alive for client in self._clients)

    @property
    def is_over(self) -> bool:
        return all(client.is_over for client in self._members)

    @property
    def _members(self) -> list[ProcessClient]:
        return [
            client for client, is_in in zip(self._clients, self._is_member, strict=True) if is_in
        ]

    @property
    def progress(self) -> Progress | None:
        return next((c.progress for c in self._clients if c.progress is not None), None)

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self._clients)

    @property
    def stats(self) -> Stats | None:
        return merged_stats([c.stats for c in self._clients if c.stats is not None])

    @property
    def is_paused(self) -> bool:
        """A replica that leaves pauses on its own account."""
        return any(
            client.is_paused
            for number, client in enumerate(self._clients)
            if self._is_member[number] and not self._is_leaving[number]
        )

    @property
    def is_asleep(self) -> bool:
        return all(client.is_asleep for client in self._members)

    @property
    def replicas(self) -> list[ReplicaView]:
        """Those that serve or are to serve."""
        return [self._view(n, c) for n, c in enumerate(self._clients) if self._is_member[n]]

    def _view(self, number: int, client: ProcessClient) -> ReplicaView:
        stats = client.stats or NO_COUNTS
        return ReplicaView(
            number=number,
            is_up=client.is_alive,
            is_drained=self._is_drained[number],
            is_leaving=self._is_leaving[number],
            num_open=0 if self._router is None else self._router.num_open[number],
            num_requests=self._num_given[number],
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            page_usage=round(stats.page_usage, 3),
            num_restarts=client.num_restarts,
            pid=client.pid,
        )

    @property
    def load(self) -> ReplicaLoad:
        """What the autoscaler decides by. A replica that is being started counts."""
        assert self._router is not None
        return ReplicaLoad(
            num_replicas=sum(
                is_in and not client.is_over
                for is_in, client in zip(self._is_member, self._clients, strict=True)
            ),
            num_requests=sum(self._router.num_open),
            num_adapters=len(self._router.open_adapters),
        )

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._ids))

    # Life

    async def start(self) -> None:
        self._over = asyncio.get_running_loop().create_future()
        await asyncio.gather(*(client.start() for client in self._members))
        infos = [client.info for client in self._members]
        self._info = merged_info(infos)
        self._hasher = PromptHasher(infos[0].page_identity, infos[0].page_size)
        self._router = Router(
            len(self._clients),
            ReplicaLimits(
                page_size=infos[0].page_size,
                max_num_seqs=infos[0].max_num_seqs,
                max_loras=infos[0].max_loras,
                max_cpu_loras=self._max_cpu_loras,
            ),
            policy=self._policy,
        )
        for number, client in enumerate(self._clients):
            self._set_given(number)
            if self._is_member[number]:
                self._watch_end(client)
        self._monitors = [asyncio.create_task(self._watch_silence())]
        if self._scale is not None:
            scaling = Scaling(self, self._scale, infos[0])
            self._monitors.append(asyncio.create_task(scaling.run()))

    def _watch_end(self, client: ProcessClient) -> None:
        """The set is over when its last member is."""

        async def wait() -> None:
            reason = await client.wait_until_over()
            if self.is_over and self._over is not None and not self._over.done():
                self._over.set_result(reason)

        watch = asyncio.create_task(wait())
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def wait_until_over(self) -> str:
        assert self._over is not None
        return await asyncio.shield(self._over)

    async def close(self) -> None:
        for monitor in self._monitors:
            monitor.cancel()
        await asyncio.gather(*self._monitors, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
        for watch in self._watches:
            watch.cancel()

    # Replicas that come and go

    async def restart(self) -> int:
        """Renew all replicas, one after the other; gives how many. No request fails: a replica
        ends when its last request has ended, and requests go to the others meanwhile."""
        if len(self._members) < 2:
            raise RequestError(
                "One replica can't be restarted without refusing requests; start the server with "
                "--replicas 2 or more.",
                field=None,
            )
        async with self._moving:
            numbers = [number for number, is_in in enumerate(self._is_member) if is_in]
            for number in numbers:
                client = self._clients[number]
                while not client.is_alive and not client.is_over:  # it is being started
                    await asyncio.sleep(WAIT_S)
                logger.info("restarting replica %d", number)
                async with self._leaving(number) as has_left:
                    if has_left:
                        await client.wake()
            return len(numbers)

    async def add(self, count: int) -> None:
        """Start so many replicas more; returns when they serve."""
        async with self._moving:
            free = [
                number
                for number, is_in in enumerate(self._is_member)
                if not is_in or self._clients[number].is_over
            ]
            started = (self._add(number) for number in free[:count])
            results = await asyncio.gather(*started, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _add(self, number: int) -> None:
        client = self._clients[number]
        logger.info("adding replica %d", number)
        self._is_member[number] = True
        try:
            if client.is_asleep:
                await client.wake()
            else:
                await client.start()
                self._watch_end(client)
                while not client.is_alive and not client.is_over:
                    await asyncio.sleep(WAIT_S)
        except BaseException:
            self._is_member[number] = False
            await client.close()
            raise

    async def remove(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """End the replica with the fewest requests when they have ended; returns then. It stays
        if it is needed again before that."""
        async with self._moving:
            assert self._router is not None
            num_open = self._router.num_open
            members = [number for number, is_in in enumerate(self._is_member) if is_in]
            number = min(members, key=lambda number: (num_open[number], -number))
            logger.info("removing replica %d", number)
            async with self._leaving(number, is_needed) as has_left:
                self._is_member[number] = not has_left

    @asynccontextmanager
    async def _leaving(
        self, number: int, is_needed: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[bool]:
        """Give a replica no more requests, and end its process when those that it has are over.
        False if it has to stay, or died by itself and is another process now."""
        client = self._clients[number]
        self._is_leaving[number] = True
        self._set_given(number)
        try:
            yield await self._let_go(number, client, is_needed)
        finally:
            self._is_leaving[number] = False
            self._set_given(number)

    async def _let_go(
        self, number: int, client: ProcessClient, is_needed: Callable[[], bool]
    ) -> bool:
        assert self._router is not None
        # Others must be there for new requests.
        while self._router.num_open[number] or not self._router.num_up:
            if not client.is_alive or is_needed():
                return False
            await asyncio.sleep(WAIT_S)
        try:
            await client.sleep(PauseMode.WAIT)
        except UnavailableError:
            return False
        return True

    def _life_of(self, number: int) -> Callable[[bool], None]:
        def tell(is_serving: bool) -> None:
            self._is_up[number] = is_serving
            self._is_drained[number] = False
            if self._router is not None:
                self._set_given(number)
                if not is_serving:
                    self._router.lost(number)

        return tell

    def _pages_of(self, number: int) -> Callable[[list[PageChange]], None]:
        def tell(changes: list[PageChange]) -> None:
            if self._router is None:
                return
            for change in changes:
                if change.is_stored:
                    self._router.stored(number, change.tier, change.hashes)
                    if change.adapter is not None:
                        name, digest = change.adapter
                        self._digests[name] = digest
                else:
                    self._router.removed(number, change.tier, change.hashes)

        return tell

    async def _watch_silence(self) -> None:
        """Drain replicas that have requests and say nothing; take them back when they speak."""
        assert self._router is not None
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now = time.monotonic()
            for number, client in enumerate(self._clients):
                is_silent = (
                    self._is_up[number]
                    and self._router.num_open[number] > 0
                    and not client.is_paused
                    and now - client.heard_at > self._silence_s
                )
                if is_silent and not self._is_drained[number]:
                    logger.warning("replica %d says nothing: it is drained", number)
                    self._is_drained[number] = True
                    self._set_given(number)
                    client.hand_back_waiting(f"replica {number} does not answer")
                elif self._is_drained[number] and now - client.heard_at <= self._silence_s:
                    logger.info("replica %d answers again", number)
                    self._is_drained[number] = False
                    self._set_given(number)

    def _set_given(self, number: int) -> None:
        """Tell the router whether a replica is given requests."""
        assert self._router is not None
        is_held = self._is_drained[number] or self._is_leaving[number]
        self._router.set_up(number, is_up=self._is_up[number] and not is_held)

    # Requests

    async def generate(self, request: Submit) -> AsyncIterator[Output]:
        route = self._route(request)
        num_begun = 0
        while True:
            number = await self._choose(route)
            has_streamed = False
            try:
                async with aclosing(self._generate_on(number, request, route)) as outputs:
                    async for output in outputs:
                        has_streamed = True
                        yield output
                return
            except EngineDiedError as error:
                num_begun += error.has_begun
                if has_streamed or num_begun >= MAX_BEGUN_ATTEMPTS or self.is_over:
                    raise
                self.num_rerouted += 1

    async def _generate_on(
        self, number: int, request: Submit, route: RouteRequest
    ) -> AsyncGenerator[Output, None]:
        assert self._router is not None
        request_id, router, has_begun = request.request_id, self._router, False
        router.begin(request_id, number, route)
        self._owners[request_id] = number
        self._num_given[number] += 1
        given_at = time.monotonic()
        try:
            given = cast("AsyncGenerator[Output, None]", self._clients[number].generate(request))
            async with aclosing(given) as outputs:
                async for output in outputs:
                    if not has_begun:
                        has_begun = True
                        router.first_token(request_id, time.monotonic() - given_at)
                    yield output
        finally:
            router.end(request_id)
            self._owners.pop(request_id, None)

    def _route(self, request: Submit) -> RouteRequest:
        """What of a request decides where it goes."""
        assert self._hasher is not None
        digest = None if request.adapter is None else self._digests.get(request.adapter)
        hashes: Sequence[int] = ()
        if request.adapter is None or digest is not None:
            namespace = Namespace(adapter=digest, salt=request.salt)
            hashes = self._hasher.hashes(request.prompt, namespace)
        return RouteRequest(hashes, len(request.prompt), request.adapter, current_session.get())

    async def _choose(self, route: RouteRequest) -> int:
        """Waits while no replica is up and one is being started."""
        assert self._router is not None
        while not self._router.num_up:
            if self.is_over or self.is_asleep:
                raise UnavailableError("no replica is up")
            await asyncio.sleep(WAIT_S)
        return self._router.choose(route)

    def abort(self, request_id: RequestId) -> bool:
        owner = self._owners.get(request_id)
        return owner is not None and self._clients[owner].abort(request_id)

    # Adapters

    async def load_adapter(self, load: LoadLora) -> LoraReply:
        name = load.name
        async with self._changing:
            results = await self._ask_living(lambda client: client.ask_load(load))
            replies = [result for result in results if isinstance(result, LoraReply)]
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors and replies and not load.in_place:
                loaded = [c for c, r in zip(self._clients, results, strict=True) if r in replies]
                undone = (client.ask_unload(name) for client in loaded)
                await asyncio.gather(*undone, return_exceptions=True)
            if errors or not replies:
                raise errors[0] if errors else UnavailableError("no replica is up")
            self.adapters.loaded(load, replies[0].path)
            # Those that were down load it before they serve; these serve already.
            late = replace(load, in_place=True)
            await self._ask_late(results, lambda client: client.ask_load(late))
            self._digests[name] = AdapterDigest(bytes.fromhex(replies[0].digest))
        return replies[0]

    async def unload_adapter(self, name: AdapterName) -> LoraReply:
        async with self._changing:
            with self.adapters.unloading(name):
                results = await self._ask_living(lambda client: client.ask_unload(name))
                await self._ask_late(results, lambda client: client.ask_unload(name))
                replies = [result for result in results if isinstance(result, LoraReply)]
                errors = [result for result in results if isinstance(result, BaseException)]
                serious = [error for error in errors if not isinstance(error, NotFoundError)]
                if serious or not replies:
                    raise (serious or errors or [UnavailableError("no replica is up")])[0]
            self._digests.pop(name, None)
        return LoraReply(
            replies[0].op_id,
            num_bytes=sum(reply.num_bytes for reply in replies),
            num_pages=sum(reply.num_pages for reply in replies),
            num_requests=sum(reply.num_requests for reply in replies),
        )

    async def _ask_living(
        self, ask: Callable[[ProcessClient], Awaitable[LoraReply]]
    ) -> list[LoraReply | BaseException | None]:
        """The replies of all replicas, None of one that is down or dies meanwhile."""

        async def at(client: ProcessClient) -> LoraReply | None:
            try:
                return await ask(client) if client.is_alive else None
            except UnavailableError:
                if client.is_alive:
                    raise
                return None

        return await asyncio.gather(*map(at, self._clients), return_exceptions=True)

    async def _ask_late(
        self,
        results: Sequence[LoraReply | BaseException | None],
        ask: Callable[[ProcessClient], Awaitable[LoraReply]],
    ) -> None:
        """Ask replicas that were down and have begun to serve since."""
        pairs = zip(self._clients, results, strict=True)
        late = [ask(client) for client, result in pairs if result is None and client.is_alive]
        await asyncio.gather(*late, return_exceptions=True)

    # All replicas at once

    async def reset_cache(self) -> ControlReply:
        return _total(await self._all(lambda client: client.reset_cache()))

    async def pause(self, mode: PauseMode) -> None:
        await self._all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda client: client.resume())

    async def update_weights(self, path: str) -> ControlReply:
        reply = _total(await self._all(lambda client: client.update_weights(path)))
        for client in self._clients:
            if not client.is_alive:
                client.note_weights(path)
        return reply

    async def sleep(self, mode: PauseMode) -> None:
        await self._all(lambda client: client.sleep(mode))

    async def wake(self) -> None:
        await self._all(lambda client: client.wake())

    async def _all(self, ask: Callable[[ProcessClient], Awaitable[T]]) -> list[T]:
        """Of every replica; the first error is raised when all have answered."""
        async with self._moving:
            results = await asyncio.gather(*map(ask, self._members), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]

    # Looking

    async def look(self, **asked: Any) -> Snapshot:
        """At the first replica that is up."""
        for client in self._clients:
            if client.is_alive:
                return await client.look(**asked)
        raise UnavailableError("no replica is up; try again in a moment")

    def watch(self, watch: EngineWatch) -> None:
        summed = _SummedSteps()
        for client in self._clients:
            client.watch(_ReplicaWatch(watch, summed))


class _SummedSteps:
    """Steps of all replicas, for a watch that expects totals of one engine."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0


class _ReplicaWatch:
    """Tells the watch of all replicas about one."""

    def __init__(self, watch: EngineWatch, summed: _SummedSteps) -> None:
        self._watch = watch
        self._summed = summed
        self._last = (0, 0)

    def loaded(self, load: LoadTime) -> None:
        self._watch.loaded(load)

    def begun(self, request_id: RequestId) -> None:
        self._watch.begun(request_id)

    def stepped(self, stats: Stats) -> None:
        steps, tokens = self._last
        if stats.total_steps < steps:  # a new process counts from 0
            steps, tokens = 0, 0
        self._last = (stats.total_steps, stats.total_step_tokens)
        self._summed.num_steps += stats.total_steps - steps
        self._summed.num_tokens += stats.total_step_tokens - tokens
        self._watch.stepped(
            replace(
                stats,
                total_steps=self._summed.num_steps,
                total_step_tokens=self._summed.num_tokens,
            )
        )


def _total(replies: Sequence[ControlReply]) -> ControlReply:
    return ControlReply(replies[0].op_id, num_pages=sum(reply.num_pages for reply in replies))
