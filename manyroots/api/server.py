"""Runs the server: listens, loads, serves, drains, ends.

Takes settings; gives the process' exit code. It listens before the model is loaded, so that
`/live` answers at once and `/health` says how far it is. SIGTERM and SIGINT drain: no new
generations, running ones have `drain_timeout_s`. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from manyroots.api.app import create_app
from manyroots.api.connections import timed_protocol
from manyroots.api.middleware import MAX_HEADER_BYTES
from manyroots.api.shared_limits import SharedLimits
from manyroots.api.state import ServerState, load_local_tokenizer, load_service
from manyroots.api.supervisor import Life, supervise
from manyroots.config import EngineSettings
from manyroots.engine.client import EngineClient
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import ConfigError, ManyrootsError, UnavailableError
from manyroots.gateway.local import ReplicaOptions, local_replicas
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.gateway.router_client import RouterClient
from manyroots.gateway.router_process import run_router
from manyroots.gateway.scaling import ScaleOptions
from manyroots.observe.requests import Sink
from manyroots.observe.throughput import INTERVAL_S, Throughput, Totals
from manyroots.observe.traces import Traces
from manyroots.process.gc_tuning import keep_for_good, taken_apart_at_exit
from manyroots.process.progress import Display
from manyroots.routing.router import RoutingPolicy
from manyroots.server_config import ServerSettings, check_together

logger = logging.getLogger("manyroots")

_LAST_WORDS_S = 5
"""After the drain, how long responses that are ending may take to be sent."""
_KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep one, 5 s (httpx) to a minute: the
side that closes last meets no request that is on its way."""
_POLL_S = 0.02
_SWITCH_INTERVAL_S = 0.001


def serve(engine_settings: EngineSettings, server_settings: ServerSettings) -> int:
    """Serve until told to stop. 0 after a drain; 1 if the engine could not start, or died too
    often, or the API process did."""
    check_together(engine_settings, server_settings)
    logging.basicConfig(
        level=server_settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
    )
    if server_settings.otlp_traces_endpoint is not None:
        Traces(server_settings.otlp_traces_endpoint).close()  # what can't be is told at once
    check_certificates(server_settings)
    listeners = [listen(_of_gateway(server_settings, i)) for i in range(server_settings.gateways)]
    _allow_connections()
    if server_settings.gateways > 1:
        return _serve_gateways(engine_settings, server_settings, listeners)
    return supervise(
        lambda life: serve_one_life(engine_settings, server_settings, listeners[0], life),
        max_restarts=server_settings.max_api_restarts,
    )


def _of_gateway(settings: ServerSettings, number: int) -> ServerSettings:
    """Gateways listen on ports that follow each other; 0 lets the system choose each."""
    return replace(settings, port=settings.port + number) if settings.port else settings


def _serve_gateways(
    engine_settings: EngineSettings, settings: ServerSettings, listeners: list[socket.socket]
) -> int:
    """Several gateways, and the router that owns the engines, in a process each."""
    limits = SharedLimits(len(listeners))
    # A folder of our own, so that no other user of the machine can reach the socket.
    with tempfile.TemporaryDirectory(prefix="manyroots-router-") as folder:
        path = f"{folder}/router"

        def gateway(number: int) -> Callable[[Life], int]:
            seat = GatewaySeat(path, number, limits)
            return lambda life: serve_one_life(
                engine_settings, settings, listeners[number], life, seat
            )

        return supervise(
            *(gateway(number) for number in range(len(listeners))),
            router=lambda life: _serve_router(engine_settings, settings, path, life),
            max_restarts=settings.max_api_restarts,
        )


def _serve_router(
    engine_settings: EngineSettings, settings: ServerSettings, path: str, life: Life
) -> int:
    _call_process("mr-router")
    with (
        Display(is_on=engine_settings.model.progress_bars) as display,
        taken_apart_at_exit(),
    ):
        replicas = _make_replicas(engine_settings, settings, display)
        return asyncio.run(run_router(replicas, path, life.orders, on_ready=keep_for_good))


def _call_process(name: str) -> None:
    """What `ps` and `top` show of it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


@dataclass(frozen=True, slots=True)
class GatewaySeat:
    """What one of several gateways is given."""

    path: str
    """Of the router's socket."""
    number: int
    limits: SharedLimits


def serve_one_life(
    engine_settings: EngineSettings,
    server_settings: ServerSettings,
    listener: socket.socket,
    life: Life,
    seat: GatewaySeat | None = None,
) -> int:
    endpoint = server_settings.otlp_traces_endpoint
    traces = None if endpoint is None else Traces(endpoint)
    if seat is not None:
        _call_process(f"mr-gateway-{seat.number}")
    # Threads that work on large requests let the event loop in sooner.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with (
        Display(is_on=engine_settings.model.progress_bars) as display,
        taken_apart_at_exit(),
    ):
        engine = (
            _make_engine(engine_settings, server_settings, display)
            if seat is None
            else RouterClient(engine_settings, seat.path)
        )
        server = _Server(
            engine,
            engine_settings,
            server_settings,
            listener,
            on_ready=keep_for_good,
            life=life,
            seat=seat,
        )
        if traces is None:
            return asyncio.run(server.run())
        server.watch_requests(traces)
        try:
            return asyncio.run(server.run())
        finally:
            traces.close()


def _make_engine(
    engine_settings: EngineSettings, settings: ServerSettings, display: Display
) -> EngineClient:
    """One engine process, or several and their router."""
    is_alone = settings.replicas == 1 and scale_options(settings) is None
    if is_alone and settings.replica_backend == "processes":
        return ProcessClient(
            engine_settings, max_restarts=settings.max_engine_restarts, on_progress=display
        )
    return _make_replicas(engine_settings, settings, display)


def _make_replicas(
    engine_settings: EngineSettings, settings: ServerSettings, display: Display
) -> ReplicaSet:
    options = ReplicaOptions(
        num_replicas=settings.replicas,
        policy=RoutingPolicy(settings.routing_policy),
        max_restarts=settings.max_engine_restarts,
        silence_s=settings.replica_silence_s,
        scale=scale_options(settings),
    )
    if settings.replica_backend == "ray":
        # Here, because it takes seconds to import and is in an extra.
        from manyroots.ray.replicas import ray_replicas

        return ray_replicas(engine_settings, options, display)
    return local_replicas(engine_settings, options, display)


def scale_options(settings: ServerSettings) -> ScaleOptions | None:
    """None where the number of replicas stays."""
    if settings.max_replicas is None or settings.max_replicas == settings.replicas:
        return None
    return ScaleOptions(
        min_replicas=settings.replicas,
        max_replicas=settings.max_replicas,
        target_requests=settings.target_ongoing_requests,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
    )


def check_certificates(settings: ServerSettings) -> None:
    """Raises ConfigError if HTTPS can't be served with these files."""
    if settings.ssl_certfile is None:
        return
    files = (settings.ssl_certfile, settings.ssl_keyfile)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A password is always given: without one, openssl would ask on the terminal.
        context.load_cert_chain(*files, password=settings.ssl_keyfile_password or "")
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:
        named = ", ".join(repr(file) for file in (*files, settings.ssl_ca_certs) if file)
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile and --ssl-ca-certs: {named} can't be used ({error}). "
            "They must be PEM files, and the key must be the certificate's."
        ) from error


def _allow_connections() -> None:
    """As many open files as the system allows: each stream is one, and 1024 is a usual limit that
    any process may raise by itself."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {settings.host} port {settings.port}: {error}. "
            "Choose others with --host and --port."
        ) from error


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: draining is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One life of the server."""

    def __init__(
        self,
        engine: EngineClient,
        engine_settings: EngineSettings,
        settings: ServerSettings,
        listener: socket.socket,
        on_ready: Callable[[], None] = lambda: None,
        life: Life | None = None,
        seat: GatewaySeat | None = None,
    ) -> None:
        """`life`: of a supervised process, which is told to stop through a pipe; without one,
        signals do. `seat`: of one of several gateways."""
        self._on_ready = on_ready
        self._life = life
        self._engine = engine
        self._engine_settings = engine_settings
        self._settings = settings
        self._listener = listener
        self._seat = seat
        limits = None if seat is None else seat.limits.of_gateway(seat.number)
        self._state = ServerState(engine, settings, limits)
        self._state.num_api_restarts = 0 if life is None else life.num_restarts
        self._web = _Uvicorn(_uvicorn_config(self._state))
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    def watch_requests(self, sink: Sink) -> None:
        self._state.request_sinks.append(sink)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if self._life is not None:
            loop.add_reader(self._life.orders, self._on_order, self._life.orders)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
        # A gateway that follows one that died lets callers wait: another one may be asked for
        # health, and a refusal now would be a request lost.
        is_gateway = self._seat is not None
        is_next = is_gateway and self._life is not None and self._life.num_restarts > 0
        web = None if is_next else self._start_web()
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        name = "" if self._seat is None else f"gateway {self._seat.number} is "
        logger.info("%slistening on %s://%s:%d", name, scheme, host, port)
        stats: asyncio.Task[None] | None = None
        try:
            if await self._load():
                web = web or self._start_web()
                if self._settings.log_stats:
                    stats = asyncio.create_task(self._log_throughput())
                await self._stopped()
                await self._drain()
            return 130 if self._stop_now.is_set() else 0
        except ManyrootsError as error:
            print(f"manyroots: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            if stats is not None:
                stats.cancel()
            if self._state.page is not None:
                self._state.page.close()
            # Requests that still run end with an error when their engine closes.
            await self._engine.close()
            self._web.should_exit = True
            if web is not None:
                await web

    def _start_web(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._web.serve(sockets=[self._listener]))

    async def _load(self) -> bool:
        """Start the engine and load the text half; False if told to stop meanwhile."""
        loading = asyncio.create_task(self._start_engine())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return False
        await loading
        return True

    async def _log_throughput(self) -> None:
        throughput = Throughput(self._totals())
        while True:
            await asyncio.sleep(INTERVAL_S)
            if (line := throughput.line(self._totals())) is not None:
                logger.info("%s", line)

    def _totals(self) -> Totals:
        assert self._state.loaded is not None
        metrics = self._state.loaded.metrics
        return Totals(
            time.monotonic(),
            metrics.total_prompt_tokens,
            metrics.total_generation_tokens,
            self._engine.stats,
        )

    async def _stopped(self) -> None:
        """Return when told to stop; raise if the engine is dead for good before that."""
        over = asyncio.create_task(self._engine.wait_until_over())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({over, stop}, return_when=asyncio.FIRST_COMPLETED)
        is_over = over.done() and not stop.done()
        over.cancel()
        stop.cancel()
        if is_over:
            raise UnavailableError(f"giving up: {over.result()}")

    async def _start_engine(self) -> None:
        begin = time.monotonic()
        # Beside the engine, where the files are here: a tokenizer's library takes seconds to
        # import, and this process has nothing else to do.
        engine = asyncio.create_task(self._engine.start())
        early = asyncio.create_task(asyncio.to_thread(load_local_tokenizer, self._engine_settings))
        try:
            done, _ = await asyncio.wait({engine, early}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        engine_s = time.monotonic() - begin
        self._state.loaded = await asyncio.to_thread(
            load_service, self._engine, self._engine_settings, self._settings, early.result()
        )
        self._state.count_usage(self._state.loaded.metrics)
        if self._settings.page:
            self._state.keep_traffic(self._engine.info.page_size)
        self._on_ready()
        ready_s = time.monotonic() - begin
        logger.info("ready in %.1f s: engine and tokenizer %.1f s, the rest %.1f s",
                    ready_s, engine_s, ready_s - engine_s)  # fmt: skip
        logger.info("serving %s", self._state.loaded.model_name)

    def _on_order(self, orders: int) -> None:
        told = os.read(orders, 64)
        if not told:
            os._exit(1)  # the parent is gone, and with it what could stop this process
        for _ in told:
            self._on_signal()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._stop.set()
        else:
            self._stop_now.set()

    async def _drain(self) -> None:
        """Wait until nothing runs, time is up, the engine dies or a second signal comes."""
        self._state.is_draining = True
        assert self._state.loaded is not None
        concurrency = self._state.loaded.concurrency
        logger.info("draining: %d sequences are running", concurrency.num_alive)
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
        while (
            concurrency.num_alive
            and self._engine.is_alive
            and not self._stop_now.is_set()
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(_POLL_S)
        if concurrency.num_alive:
            logger.warning("ending %d sequences that still run", concurrency.num_alive)


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        # h11 reads strictly: conflicting lengths, bad chunks and the like are a 400.
        http=timed_protocol(state.settings.request_read_timeout_s, state.count_read_timeout),
        ws="none",
        lifespan="off",
        # Above our own limit, so that our own answer comes first where it can.
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        # No proxy is trusted to name the client.
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        ssl_certfile=state.settings.ssl_certfile,
        ssl_keyfile=state.settings.ssl_keyfile,
        ssl_keyfile_password=state.settings.ssl_keyfile_password,
        ssl_ca_certs=state.settings.ssl_ca_certs,
        ssl_cert_reqs=state.settings.ssl_cert_reqs,
    )
