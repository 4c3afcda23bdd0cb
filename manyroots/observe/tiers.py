"""Tiers for Prometheus: what was found where, why not more, and how storage is.

Takes the engine's newest counts when scraped; gives metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manyroots.messages import Stats


class TierCounts(Collector):
    """By tier and by reason."""

    def __init__(self, model_name: str, read_stats: Callable[[], Stats | None]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        if stats is None:
            return
        host = stats.total_host_hit_tokens - stats.total_storage_hit_tokens
        tiers = {
            "device": stats.total_hit_tokens - stats.total_host_hit_tokens,
            "host": host,
            "storage": stats.total_storage_hit_tokens,
        }
        yield self._counter(
            "manyroots:prefix_cache_hits_by_tier", "Prompt tokens found cached.", "tier", tiers
        )
        yield self._counter(
            "manyroots:prefix_cache_misses",
            "Prompt tokens computed though whole pages of them could have been found.",
            "reason",
            stats.missed_tokens,
        )
        if stats.num_host_pages:
            yield self._gauge(
                "manyroots:host_pages_total", "Pages in host memory.", stats.num_host_pages
            )
            yield self._gauge(
                "manyroots:host_pages_cached", "Host pages in use.", stats.num_cached_host_pages
            )
        if stats.self_check is not None:
            checks = {
                "same": stats.self_check.total_checks - stats.self_check.total_differences,
                "different": stats.self_check.total_differences,
            }
            yield self._counter(
                "manyroots:cache_self_checks",
                "Cache hits that were recomputed and compared.",
                "result",
                checks,
            )
        yield self._counter(
            "manyroots:first_runs",
            "Kernels compiled and graphs captured for steps, because the start did not.",
            "kind",
            stats.first_runs,
        )
        if stats.connector_drops:
            yield self._counter(
                "manyroots:connector_batches_dropped",
                "Batches of events that a connector was too slow for.",
                "connector",
                stats.connector_drops,
            )
            yield self._counter(
                "manyroots:connector_failures",
                "Calls of a connector that raised.",
                "connector",
                stats.connector_failures,
            )
        storage = stats.storage
        if storage is None:
            return
        lost = {
            "missing": storage.total_missing_units,
            "unreachable": storage.total_failed_units,
            "unwritten": storage.total_unwritten_units,
        }
        yield self._counter(
            "manyroots:storage_units_lost",
            "Units that storage did not read or write.",
            "reason",
            lost,
        )
        yield self._counter(
            "manyroots:storage_outages",
            "Times that storage was switched off after failures.",
            "kind",
            {"any": storage.total_outages},
        )
        yield self._gauge("manyroots:storage_readable", "1 if reads are on.", int(storage.is_read))
        yield self._gauge(
            "manyroots:storage_writable", "1 if writes are on.", int(storage.is_written)
        )

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(name, text, labels=["model_name", label])
        for kind, value in values.items():
            counter.add_metric([self._model_name, kind], value)
        return counter

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge
