"""docs/reference/metrics.md: every metric of `/metrics`, from a registry that has them all."""

from __future__ import annotations

from typing import Any

from prometheus_client.core import Metric

from manyroots.ids import AdapterName, RequestId, Tier
from manyroots.messages import (
    AdapterStats,
    LoadTime,
    SelfCheckStats,
    SpeculationStats,
    Stats,
    StorageStats,
)
from manyroots.observe.metrics import Metrics
from manyroots.observe.requests import RequestFacts
from manyroots.observe.usage import RefusedCounts, UsageCounts
from tools.docs.markdown import NOTICE, code, table

HEAD = f"""\
# Metrics: what /metrics has

{NOTICE}
Names that begin with `vllm:` are those that dashboards for vLLM read. A counter has the suffix
`_total`, a histogram `_bucket`, `_sum` and `_count`. Some metrics exist only where their feature is
on: adapters, host and storage tiers, keys, `--kv-check-share`, `--speculative-config`.

"""


def _zeros(kind: Any, **given: Any) -> Any:
    return kind(**dict.fromkeys(kind.__dataclass_fields__, 0) | given)


def collected() -> list[Metric]:
    """The metrics of a server with every feature on, after one request of an adapter."""
    stats = _zeros(
        Stats,
        num_host_pages=1,
        adapters=_zeros(AdapterStats),
        storage=_zeros(StorageStats),
        self_check=_zeros(SelfCheckStats),
        missed_tokens={"cold": 0},
        first_runs={"kernel": 0},
        speculation=_zeros(SpeculationStats, accepted_by_place=(0,)),
    )
    metrics = Metrics("model", lambda: stats, max_loras=1, cache_config={"block_size": "16"})
    UsageCounts(metrics.registry).take(RequestFacts("id", "model", 1, (), tenant="key"))
    metrics.registry.register(RefusedCounts(lambda: [("key", {"running": 0})]))
    sequence = metrics.sequence(RequestId(0), 5, AdapterName("adapter"))
    sequence.adapter_was = Tier.HOST
    sequence.begin()
    sequence.tokens(1)
    sequence.finish("stop")
    metrics.loaded(LoadTime(source=Tier.STORAGE, target=Tier.DEVICE, seconds=0.1, is_good=True))
    metrics.render(read_timeouts={"headers": 0})
    return list(metrics.registry.collect())


def _row(metric: Metric) -> tuple[str, str, str, str]:
    labels = dict.fromkeys(name for sample in metric.samples for name in sample.labels)
    suffix = "_total" if metric.type == "counter" else ""
    shown = ", ".join(code(name) for name in labels if name not in ("model_name", "le"))
    return code(metric.name + suffix), metric.type, shown, metric.documentation


def page() -> str:
    rows = sorted(_row(metric) for metric in collected())
    return HEAD + table(("metric", "type", "labels besides `model_name`", "meaning"), rows)
