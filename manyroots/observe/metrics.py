"""Numbers for Prometheus, under the names that vLLM's dashboards already read.

Takes times and counts of sequences as they happen, and the engine's own counts when scraped;
gives the text of `/metrics`. Has a registry of its own: two servers in one process don't mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from manyroots.ids import AdapterName, RequestId, Tier
from manyroots.messages import LoadTime, Stats
from manyroots.observe.adapters import AdapterCounts, AdapterMetrics
from manyroots.observe.recent import RecentTimes, ReuseByAdapter
from manyroots.observe.speculation import DraftCounts
from manyroots.observe.tiers import TierCounts

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class Metrics:
    """One server's numbers."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], Stats | None],
        *,
        count_adapters: Callable[[], int] = lambda: 0,
        max_loras: int | None = None,
        read_life: Callable[[], tuple[bool, int]] = lambda: (True, 0),
        cache_config: Mapping[str, str] | None = None,
        request_bytes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`max_loras`: None if LoRA is off, which leaves out what would always be 0. `read_life`:
        whether the engine is alive, and how often it was started again. `cache_config`: the cache's
        sizes and switches, which are shown as labels. `request_bytes`: lengths of requests, and the
        memory that each holds."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self.total_prompt_tokens = 0
        self.total_generation_tokens = 0
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens received.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success", "Sequences that ended, by reason.",
            ("model_name", "finished_reason"), registry=self.registry,
        )  # fmt: skip
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time to the first token."
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens."
        )
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Time of whole sequences.")
        self.queue = self._histogram("request_queue_time_seconds", "Time in the queue.")
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from leaving the queue to the first token."
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from the first to the last token."
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "Time from leaving the queue to the last token."
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time between two tokens."
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _TOKENS)
        self._last_steps = (0, 0)
        self._timers: dict[RequestId, SequenceTimer] = {}
        self.request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens per sequence.", _TOKENS
        )
        self.request_generation = self._histogram(
            "request_generation_tokens", "Output tokens per sequence.", _TOKENS
        )
        self.registry.register(_EngineCounts(self._labels, read_stats, read_life))
        if cache_config is not None:
            self.registry.register(_Collected(lambda: _cache_info(self._labels, cache_config)))
        self.registry.register(_Collected(lambda: _request_bytes(self._labels, request_bytes)))
        self.registry.register(TierCounts(model_name, read_stats))
        self.registry.register(DraftCounts(model_name, read_stats))
        self._read_timeouts: Mapping[str, int] = {}
        self._num_api_restarts = 0
        self.registry.register(_Collected(self._collect_of_server))
        self.adapters = AdapterMetrics(self.registry, model_name, _SECONDS)
        self.recent_first_tokens = RecentTimes(512)
        self.recent_gaps = RecentTimes(4096)
        self.reuse = ReuseByAdapter()
        if max_loras is not None:
            self.registry.register(
                AdapterCounts(
                    model_name,
                    self.adapters,
                    lambda: stats.adapters if (stats := read_stats()) else None,
                    count_adapters,
                    max_loras,
                )
            )
        self.registry.register(
            _Alias("vllm:time_per_output_token_seconds", self._inter_token_collector)
        )

    def sequence(
        self, request_id: RequestId, num_prompt_tokens: int, adapter: AdapterName | None
    ) -> SequenceTimer:
        """Begin to time one sequence."""
        timer = SequenceTimer(self, request_id, num_prompt_tokens, adapter)
        self._timers[request_id] = timer
        return timer

    # What the engine tells

    def begun(self, request_id: RequestId) -> None:
        """A sequence begins to compute; the first time counts."""
        if (timer := self._timers.get(request_id)) is not None:
            timer.begin()

    def loaded(self, load: LoadTime) -> None:
        self.adapters.loaded(load)

    def stepped(self, stats: Stats) -> None:
        """The counts after a step. An engine that was started again counts from 0."""
        steps, tokens = self._last_steps
        if stats.total_steps < steps:
            steps, tokens = 0, 0
        self._last_steps = (stats.total_steps, stats.total_step_tokens)
        num_steps = stats.total_steps - steps
        for _ in range(num_steps):
            self._step_tokens.observe((stats.total_step_tokens - tokens) / num_steps)

    def age_s(self, request_id: RequestId) -> float | None:
        """Since a sequence came; None if it is not here."""
        timer = self._timers.get(request_id)
        return None if timer is None else time.monotonic() - timer.start_s

    def finished(self, request_id: RequestId, reason: str) -> None:
        del self._timers[request_id]
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(
        self,
        *,
        read_timeouts: Mapping[str, int] | None = None,
        num_api_restarts: int = 0,
        with_adapters: bool = True,
    ) -> bytes:
        """`read_timeouts`: requests given up half sent, by what was missing. `with_adapters`: also
        what has the name of an adapter."""
        self._read_timeouts = read_timeouts or {}
        self._num_api_restarts = num_api_restarts
        if with_adapters:
            return generate_latest(self.registry)
        return generate_latest(_WithoutAdapters(self.registry))

    def _collect_of_server(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "manyroots:request_read_timeouts",
            "Requests that timed out half sent, by what was missing.",
            labels=["model_name", "part"],
        )  # fmt: skip
        for part, count in self._read_timeouts.items():
            counter.add_metric([*self._labels.values(), part], count)
        yield counter
        restarts = CounterMetricFamily(
            "manyroots:api_restarts", "Dead API processes started again.", labels=["model_name"]
        )
        restarts.add_metric([*self._labels.values()], self._num_api_restarts)
        yield restarts

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"vllm:{name}", help, ("model_name",), registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", help, ("model_name",), buckets=buckets, registry=self.registry
        )
        if name.startswith("inter_token"):
            self._inter_token_collector = histogram
        return histogram.labels(**self._labels)


class SequenceTimer:
    """Times one sequence and passes what it sees on to the metrics."""

    __slots__ = (
        "_adapter",
        "_begun",
        "_first",
        "_last",
        "_metrics",
        "_num_prompt_tokens",
        "_num_tokens",
        "_request_id",
        "_start",
        "adapter_was",
    )

    def __init__(
        self,
        metrics: Metrics,
        request_id: RequestId,
        num_prompt_tokens: int,
        adapter: AdapterName | None,
    ) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._begun: float | None = None
        self._first = 0.0
        self._adapter = adapter
        self.adapter_was: Tier | None = None
        """Where its adapter was when it came, once the engine has said so."""
        if adapter is not None:
            metrics.adapters.begin(adapter)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._start = self._last = time.monotonic()

    @property
    def start_s(self) -> float:
        return self._start

    def reused(self, num_cached_tokens: int) -> None:
        """So much of its prompt was found; told with the first token."""
        self._metrics.reuse.count(self._adapter, self._num_prompt_tokens, num_cached_tokens)

    def begin(self) -> None:
        """It has left the queue, for the first time or again."""
        if self._begun is None:
            self._begun = time.monotonic()

    def tokens(self, count: int) -> None:
        """This many tokens have just arrived."""
        if not count:
            return
        now = time.monotonic()
        if not self._num_tokens:
            self._first = now
            self._metrics.first_token.observe(now - self._start)
            self._metrics.recent_first_tokens.add(now - self._start)
            if self._adapter is not None:
                was, seconds = self.adapter_was, now - self._start
                self._metrics.adapters.first_token(self._adapter, was, seconds)
            self._metrics.prompt_tokens.inc(self._num_prompt_tokens)
            self._metrics.total_prompt_tokens += self._num_prompt_tokens
        else:
            self._metrics.inter_token.observe((now - self._last) / count)
            self._metrics.recent_gaps.add((now - self._last) / count)
        self._metrics.generation_tokens.inc(count)
        self._metrics.total_generation_tokens += count
        self._num_tokens += count
        self._last = now

    def finish(self, reason: str) -> None:
        self._metrics.finished(self._request_id, reason)
        self._tell_phases()
        if self._adapter is not None:
            self._metrics.adapters.end(self._adapter, has_begun=self._num_tokens > 0)
        self._metrics.end_to_end.observe(time.monotonic() - self._start)
        self._metrics.request_prompt.observe(self._num_prompt_tokens)
        self._metrics.request_generation.observe(self._num_tokens)

    def _tell_phases(self) -> None:
        """Where the time went, of a sequence that came to a token."""
        metrics, begun = self._metrics, self._begun
        if begun is None or not self._num_tokens:
            return
        metrics.queue.observe(begun - self._start)
        metrics.prefill.observe(self._first - begun)
        metrics.decode.observe(self._last - self._first)
        metrics.inference.observe(self._last - begun)
        if self._num_tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (self._num_tokens - 1))


def _cache_info(labels: Mapping[str, str], config: Mapping[str, str]) -> Iterable[Metric]:
    gauge = GaugeMetricFamily(
        "vllm:cache_config_info", "The cache's sizes and switches.", labels=[*labels, *config]
    )
    gauge.add_metric([*labels.values(), *config.values()], 1)
    yield gauge


def _request_bytes(labels: Mapping[str, str], sizes: Sequence[tuple[int, int]]) -> Iterable[Metric]:
    gauge = GaugeMetricFamily(
        "manyroots:request_cache_bytes",
        "Device memory that one decoding request of so many tokens holds in the cache.",
        labels=[*labels, "num_tokens"],
    )
    for num_tokens, num_bytes in sizes:
        gauge.add_metric([*labels.values(), str(num_tokens)], num_bytes)
    yield gauge


_ADAPTER_LABELS = frozenset({"adapter", "waiting_lora_adapters", "running_lora_adapters"})


class _WithoutAdapters:
    """A registry's metrics without the samples that name an adapter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self.registry.collect():
            metric.samples = [
                sample for sample in metric.samples if not _ADAPTER_LABELS & sample.labels.keys()
            ]
            yield metric


class _EngineCounts(Collector):
    """Reads the engine's newest counts when scraped: counting costs its steps nothing."""

    def __init__(
        self,
        labels: dict[str, str],
        read_stats: Callable[[], Stats | None],
        read_life: Callable[[], tuple[bool, int]],
    ) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._read_stats = read_stats
        self._read_life = read_life

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        if stats is None:  # before the first step
            zeros: dict[str, Any] = dict.fromkeys(Stats.__dataclass_fields__, 0)
            stats = Stats(**(zeros | {"adapters": None}))
        is_alive, num_restarts = self._read_life()
        gauges = {
            "manyroots:engine_up": ("1 while the engine's process can serve.", int(is_alive)),
            "vllm:num_requests_running": ("Sequences in the batch.", stats.num_running),
            "vllm:num_requests_waiting": ("Sequences in the queue.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of pages that requests hold, of the fullest family of layers; 1 is all.",
                stats.page_usage,
            ),
            "manyroots:pages_total": ("Pages on the device.", stats.num_pages),
            "manyroots:pages_free": ("Pages with nothing in them.", stats.num_free_pages),
            "manyroots:pages_cached": (
                "Reusable pages that no request holds.",
                stats.num_cached_pages,
            ),
            "manyroots:pages_held": ("Pages that requests hold.", stats.num_held_pages),
        }
        counters = {
            "manyroots:engine_restarts": ("Dead engines started again.", num_restarts),
            "manyroots:checkpoints_skipped": (
                "States of recurrent layers that were not saved because memory was full.",
                stats.total_skipped_checkpoints,
            ),
            "vllm:num_preemptions": ("Sequences retracted for memory.", stats.total_retractions),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up.", stats.total_lookup_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens found cached.", stats.total_hit_tokens),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter


class _Collected(Collector):
    """What a function gives when scraped."""

    def __init__(self, give: Callable[[], Iterable[Metric]]) -> None:
        self._give = give

    def collect(self) -> Iterable[Metric]:
        return self._give()


class _Alias(Collector):
    """A histogram under its older name, which dashboards still use; observed only once."""

    def __init__(self, name: str, original: Histogram) -> None:
        self._name = name
        self._original = original

    def collect(self) -> Iterable[Metric]:
        for metric in self._original.collect():
            alias = Metric(self._name, metric.documentation, metric.type)
            for sample in metric.samples:
                suffix = sample.name.removeprefix(metric.name)
                alias.samples.append(sample._replace(name=self._name + suffix))
            yield alias
