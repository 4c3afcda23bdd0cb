"""Counts of a gateway's replicas for the metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from manyroots.snapshot import ReplicaView


class ReplicaCounts(Collector):
    """Reads the replicas when scraped."""

    def __init__(
        self,
        model_name: str,
        read: Callable[[], Sequence[ReplicaView]],
        read_rerouted: Callable[[], int],
    ) -> None:
        self._model_name = model_name
        self._read = read
        self._read_rerouted = read_rerouted

    def collect(self) -> Iterable[Metric]:
        views = self._read()
        model, each = ["model_name"], ["model_name", "replica"]
        for name, text, value in (
            ("manyroots:replicas", "Engines of this gateway.", len(views)),
            ("manyroots:replicas_up", "Engines that can serve.", sum(v.is_up for v in views)),
            (
                "manyroots:replicas_drained",
                "Engines that do not answer and get no requests.",
                sum(v.is_drained for v in views),
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=model)
            gauge.add_metric([self._model_name], value)
            yield gauge
        rerouted = CounterMetricFamily(
            "manyroots:requests_rerouted", "Requests whose replica died.", labels=model
        )
        rerouted.add_metric([self._model_name], self._read_rerouted())
        yield rerouted
        given = CounterMetricFamily(
            "manyroots:replica_requests", "Requests given to a replica.", labels=each
        )
        alive = GaugeMetricFamily(
            "manyroots:replica_requests_open", "Requests that a replica has.", labels=each
        )
        for view in views:
            given.add_metric([self._model_name, str(view.number)], view.num_requests)
            alive.add_metric([self._model_name, str(view.number)], view.num_open)
        yield given
        yield alive
