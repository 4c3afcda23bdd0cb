"""What the running server knows: its phase, its engine, and the model once it is loaded.

Given to every route through `app.state.server`. Phases only move forward: loading, ready,
draining; an engine that is dead, or being started again, shows through the engine itself.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections import Counter as Tally
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request

from manyroots.api.adapters import Adapters
from manyroots.api.body import read_request
from manyroots.api.concurrency import ConcurrencyLimit
from manyroots.api.notices import Notices
from manyroots.api.shared_limits import GatewayLimits
from manyroots.api.tenants import LocalCounts, Tenants, load_tenants
from manyroots.api.uploads import Uploads
from manyroots.config import CacheSettings, EngineSettings, LoraSettings
from manyroots.engine.client import EngineClient
from manyroots.engine.input_processor import InputProcessor
from manyroots.errors import UnavailableError
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.gateway.router_client import ROUTER_WAIT_S, RouterClient
from manyroots.messages import EngineInfo
from manyroots.observe.metrics import Metrics
from manyroots.observe.replicas import ReplicaCounts
from manyroots.observe.requests import RequestFacts, RequestWatch, Sink, log_request
from manyroots.observe.traffic import TrafficRing
from manyroots.observe.usage import RefusedCounts, UsageCounts, UsageLog
from manyroots.server_config import ServerSettings
from manyroots.text.chat import ChatTemplate, load_chat_template
from manyroots.text.generation_config import NO_DEFAULTS, SamplingDefaults, sampling_defaults
from manyroots.text.tokenizer import Tokenizer
from manyroots.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from manyroots.api.page.hub import PageHub

T = TypeVar("T")

POLL_S = 0.02


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    """Its engine has died and is being started again."""
    ASLEEP = "asleep"
    """Its memory is given back until it is woken."""
    DEAD = "dead"


class Service:
    """A loaded model, with everything that a request to it needs."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        server: ServerSettings,
        *,
        model_name: str,
        lora: LoraSettings,
        cache: CacheSettings | None = None,
        rng: random.Random | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.model_name = model_name
        self.created = int(time.time())
        self.defaults = defaults
        self.input_processor = InputProcessor(
            engine.info, tokenizer, rng, default_max_tokens=defaults.max_tokens
        )
        self.concurrency = ConcurrencyLimit(engine.info.max_num_seqs + server.max_queued_requests)
        self.adapters = Adapters(
            model_name,
            engine.adapters,
            is_enabled=lora.enable_lora,
            has_sources=bool(lora.lora_source),
        )
        self.uploads = Uploads(lora)
        self.metrics = Metrics(
            model_name,
            lambda: engine.stats,
            count_adapters=lambda: len(self.adapters.all()),
            max_loras=engine.info.max_loras if lora.enable_lora else None,
            read_life=lambda: (engine.is_alive, engine.num_restarts),
            cache_config=_cache_config(engine.info, cache or CacheSettings()),
            request_bytes=engine.info.request_bytes,
        )
        engine.watch(self.metrics)
        if isinstance(engine, ReplicaSet | RouterClient):
            self.metrics.registry.register(
                ReplicaCounts(model_name, lambda: engine.replicas, lambda: engine.num_rerouted)
            )


def _cache_config(info: EngineInfo, cache: CacheSettings) -> dict[str, str]:
    """What vLLM's dashboards want to know of the cache; values are labels there."""
    return {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "gpu_memory_utilization": str(cache.gpu_memory_utilization),
        "cache_dtype": info.dtype,
    }


def load_local_tokenizer(settings: EngineSettings) -> Tokenizer | None:
    """The tokenizer, if its files are on this machine; None if the engine must fetch them first."""
    source = settings.model.tokenizer or settings.model.model
    path = Path(source).expanduser()
    return load_tokenizer(str(path), revision=settings.model.revision) if path.exists() else None


def load_service(
    engine: EngineClient,
    settings: EngineSettings,
    server: ServerSettings,
    tokenizer: Tokenizer | None = None,
) -> Service:
    """Load the template, and the tokenizer if it is not there yet, of the engine's model."""
    info, model = engine.info, settings.model
    if tokenizer is None:
        tokenizer = load_tokenizer(model.tokenizer or info.model_path, revision=model.revision)
    return Service(
        engine,
        tokenizer,
        load_chat_template(
            tokenizer,
            model.chat_template,
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
        ),
        server,
        model_name=model.served_model_name or info.model_name,
        lora=settings.lora,
        cache=settings.cache,
        rng=random.Random(model.seed),
        defaults=sampling_defaults(
            info.model_path, model.generation_config, model.override_generation_config
        ),
    )


class ServerState:
    """The server from its first moment, before there is a model, to its last."""

    def __init__(
        self,
        engine: EngineClient,
        settings: ServerSettings,
        limits: GatewayLimits | None = None,
    ) -> None:
        """`limits`: the counts of keys that this gateway shares with others."""
        self.engine = engine
        self.settings = settings
        self.notices = Notices(refuses_unknown=settings.strict_requests)
        self.loaded: Service | None = None
        self.is_draining = False
        self.updating = asyncio.Lock()
        """Held while the model gets other weights: one update at a time."""
        self.num_pauses = 0
        """Pauses that were requested, so that no update ends one of them."""
        self.num_api_restarts = 0
        """API processes before this one that a signal ended."""
        self.read_timeouts: Tally[str] = Tally({"headers": 0, "body": 0})
        """Requests that were given up half sent, by what was missing."""

        self.page: PageHub | None = None
        """Made when a page is first opened."""
        self.traffic: TrafficRing | None = None
        """The last requests without their texts, once the model is loaded; None without a page."""
        self.request_sinks: list[Sink] = [log_request] if settings.enable_log_requests else []
        self.tenants: Tenants | None = None
        """Keys with rights of their own."""
        if settings.keys_file is not None:
            make = LocalCounts if limits is None else limits.of_key
            self.tenants = load_tenants(settings.keys_file, make_counts=make)
        if settings.usage_log is not None:
            self.request_sinks.append(UsageLog(settings.usage_log).take)

    def count_usage(self, metrics: Metrics) -> None:
        """Have the metrics of a loaded model show what keys use."""
        tenants = self.tenants
        if tenants is not None:
            self.request_sinks.append(UsageCounts(metrics.registry).take)
            metrics.registry.register(
                RefusedCounts(lambda: [(item.name, item.refused) for item in tenants.all()])
            )

    def keep_traffic(self, page_size: int) -> None:
        """Remember the last requests for the page, without their texts."""
        self.traffic = TrafficRing(page_size)
        self.request_sinks.append(self.traffic.take)

    def watch(self, facts: RequestFacts, *more: Sink) -> RequestWatch:
        return RequestWatch(facts, [*self.request_sinks, *more] if more else self.request_sinks)

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a caller's request; at one of several gateways, when replicas serve."""
        body = await read_request(
            request, kind, max_bytes=self.settings.max_body_bytes, notices=self.notices
        )
        await self._until_served()
        return body

    async def _until_served(self) -> None:
        """A router that has died is back in a moment: requests wait for it, for a while. A server
        with one gateway tells its callers at once, because nothing else can tell them."""
        end_s = time.monotonic() + ROUTER_WAIT_S if self.settings.gateways > 1 else 0.0
        while (
            self.phase in (Phase.LOADING, Phase.RESTARTING)
            and not self.is_draining
            and time.monotonic() < end_s
        ):
            await asyncio.sleep(POLL_S)

    def count_read_timeout(self, part: str) -> None:
        self.read_timeouts[part] += 1

    @property
    def phase(self) -> Phase:
        if self.loaded is None:
            return Phase.LOADING
        if self.engine.is_over:
            return Phase.DEAD
        if self.engine.is_asleep:
            return Phase.ASLEEP
        if not self.engine.is_alive:
            return Phase.RESTARTING
        return Phase.DRAINING if self.is_draining else Phase.READY

    @property
    def service(self) -> Service:
        """The model, for a route that can't do without; raises UnavailableError."""
        if self.loaded is None:
            raise UnavailableError("The model is still loading; try again in a moment.")
        match self.phase:
            case Phase.RESTARTING:
                raise UnavailableError(
                    "The engine has died and is being started again; try again in a moment."
                )
            case Phase.ASLEEP:
                raise UnavailableError("The engine is asleep; it answers when it has been woken.")
            case Phase.DEAD if not self.is_draining:
                raise UnavailableError("The engine has died; the server is ending.")
        return self.loaded

    @property
    def accepting(self) -> Service:
        """The model, for a new generation; raises UnavailableError."""
        if self.is_draining:
            raise UnavailableError("The server is shutting down; ask another one.")
        return self.service


def server_of(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state
