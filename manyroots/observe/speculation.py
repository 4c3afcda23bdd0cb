"""Drafts for Prometheus, by vLLM's names.

Takes the engine's newest counts when scraped; gives metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from manyroots.messages import Stats


class DraftCounts(Collector):
    """What was drafted, and what of it was right. Nothing without --speculative-config."""

    def __init__(self, model_name: str, read_stats: Callable[[], Stats | None]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        told = None if stats is None else stats.speculation
        if told is None:
            return
        counts = {
            "num_drafts": ("Drafts that steps checked.", told.total_drafts),
            "num_draft_tokens": ("Tokens of drafts.", told.total_draft_tokens),
            "num_accepted_tokens": ("Draft tokens that were right.", told.total_accepted_tokens),
        }
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by position in the draft.",
            labels=["model_name", "position"],
        )
        for place, value in enumerate(told.accepted_by_place):
            by_place.add_metric([self._model_name, str(place)], value)
        yield by_place
