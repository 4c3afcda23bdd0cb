"""Numbers about adapters: where they are, how long they took to get there, which requests use them.

Takes requests as they begin and end, loads as they end, and the engine's counts when scraped.
Labels are names that are registered, so that callers can't make new ones; a name that is unloaded
takes its label along.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manyroots.ids import AdapterName, Tier
from manyroots.messages import AdapterStats, LoadTime

_LOAD_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_WAS = {Tier.DEVICE: "warm", Tier.HOST: "host", Tier.STORAGE: "disk"}


class AdapterMetrics:
    """One server's numbers about adapters."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, first_token_buckets: tuple[float, ...]
    ) -> None:
        self._model_name = model_name
        self._requests = Counter(
            "manyroots:adapter_requests", "Sequences begun, by adapter.",
            ("model_name", "adapter"), registry=registry,
        )  # fmt: skip
        self._load_seconds = Histogram(
            "manyroots:adapter_load_seconds",
            "Time to read an adapter from storage or to load it to the device.",
            ("model_name", "source", "target"), buckets=_LOAD_SECONDS, registry=registry,
        )  # fmt: skip
        self._failed = Counter(
            "manyroots:adapter_failed_loads", "Adapters that could not be read or loaded.",
            ("model_name",), registry=registry,
        ).labels(model_name)  # fmt: skip
        self._first_token = Histogram(
            "manyroots:adapter_time_to_first_token_seconds",
            "Time to the first token, by where the adapter was when its request came.",
            ("model_name", "adapter_was"), buckets=first_token_buckets, registry=registry,
        )  # fmt: skip
        self.waiting: Tally[AdapterName] = Tally()
        """Sequences without a token yet, by adapter."""
        self.running: Tally[AdapterName] = Tally()

    def begin(self, adapter: AdapterName) -> None:
        self._requests.labels(self._model_name, adapter).inc()
        self.waiting[adapter] += 1

    def first_token(self, adapter: AdapterName, was: Tier | None, seconds: float) -> None:
        self.waiting[adapter] -= 1
        self.running[adapter] += 1
        if was is not None:
            self._first_token.labels(self._model_name, _WAS[was]).observe(seconds)

    def end(self, adapter: AdapterName, *, has_begun: bool) -> None:
        (self.running if has_begun else self.waiting)[adapter] -= 1

    def loaded(self, load: LoadTime) -> None:
        if not load.is_good:
            self._failed.inc()
            return
        labels = (self._model_name, load.source.value, load.target.value)
        self._load_seconds.labels(*labels).observe(load.seconds)

    def forget(self, adapter: str) -> None:
        """Its name means nothing any more."""
        with contextlib.suppress(KeyError):  # no request has named it
            self._requests.remove(self._model_name, adapter)
        for tally in (self.waiting, self.running):
            if not tally[AdapterName(adapter)]:
                del tally[AdapterName(adapter)]


class AdapterCounts(Collector):
    """Reads the newest counts when scraped."""

    def __init__(
        self,
        model_name: str,
        metrics: AdapterMetrics,
        read_stats: Callable[[], AdapterStats | None],
        count_names: Callable[[], int],
        max_loras: int,
    ) -> None:
        self._model_name = model_name
        self._metrics = metrics
        self._read_stats = read_stats
        self._count_names = count_names
        self._max_loras = max_loras

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats() or AdapterStats(*[0] * len(AdapterStats.__dataclass_fields__))
        where = GaugeMetricFamily(
            "manyroots:adapters", "Adapters by the tiers that have them.",
            labels=["model_name", "tier"],
        )  # fmt: skip
        where.add_metric([self._model_name, "device"], stats.num_on_device)
        where.add_metric([self._model_name, "host"], stats.num_on_host)
        where.add_metric([self._model_name, "storage"], self._count_names())
        yield where
        for name, text, value in (
            ("slots_total", "Device slots for adapters.", stats.num_slots),
            ("slots_used", "Device slots that are taken.", stats.num_on_device + stats.num_loading),
            ("bytes_total", "Device memory for adapters (--max-loras auto).", stats.device_bytes),
            ("bytes_used", "Device memory that adapters take.", stats.used_device_bytes),
            ("running", "Distinct adapters in the batch.", stats.num_running),
            ("loading", "Adapters on their way to the device.", stats.num_loading),
            ("draining", "Unloaded versions that requests still use.", stats.num_draining),
        ):
            gauge = GaugeMetricFamily(f"manyroots:adapter_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        yield self._by_label(
            "loads", "Loads to the device.", "source",
            {"host": stats.total_loads_from_host, "storage": stats.total_loads_from_storage},
        )  # fmt: skip
        yield self._by_label(
            "evictions", "Adapters evicted from a tier for others.", "tier",
            {"device": stats.total_device_evictions, "host": stats.total_host_evictions},
        )  # fmt: skip
        left = CounterMetricFamily(
            "manyroots:adapter_left", "Adapters that left a tier, by why.",
            labels=["model_name", "tier", "reason"],
        )  # fmt: skip
        for tier, reason, count in (
            ("device", "evicted", stats.total_device_evictions),
            ("device", "unloaded", stats.total_device_unloads),
            ("host", "evicted", stats.total_host_evictions),
            ("host", "unloaded", stats.total_host_unloads),
        ):
            left.add_metric([self._model_name, tier, reason], count)
        yield left
        yield self._requests_info()

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(
            f"manyroots:adapter_{name}", text, labels=["model_name", label]
        )
        for tier, value in values.items():
            counter.add_metric([self._model_name, tier], value)
        return counter

    def _requests_info(self) -> Metric:
        """As vLLM shows it: names in labels, and when this was so as the value."""
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters that are running and waiting.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )  # fmt: skip
        waiting, running = (
            ",".join(sorted(name for name, count in tally.items() if count > 0))
            for tally in (self._metrics.waiting, self._metrics.running)
        )
        info.add_metric([str(self._max_loras), waiting, running], time.time())
        return info
