"""Replicas as Ray actors: on this machine's own Ray, or on a cluster."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from manyroots.config import EngineSettings
from manyroots.errors import ConfigError
from manyroots.gateway.local import ReplicaOptions, make_replicas
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.process.progress import Progress

logger = logging.getLogger("manyroots")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def ray_replicas(
    settings: EngineSettings,
    options: ReplicaOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ReplicaSet:
    """Engines that Ray places, with the same settings, not started yet. Joins the cluster of
    RAY_ADDRESS; without it, starts a Ray of this machine."""
    try:
        import ray

        from manyroots.ray.child import RayChild
    except ImportError as error:
        raise ConfigError(
            f"--replica-backend ray needs Ray, which can't be imported ({error}): "
            "pip install 'manyroots[ray]'."
        ) from error
    if not ray.is_initialized():
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        # Nothing is reported to the network.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if "RAY_ADDRESS" in os.environ:
            ray.init(logging_level=logging.WARNING, log_to_driver=True)
        else:
            # It has room for all replicas, as processes without Ray have.
            start_own_ray(max(os.cpu_count() or 1, options.max_replicas))
        # Ray's own handler would end this process before it has drained.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    actor = actor_options(settings)
    return make_replicas(settings, options, lambda number: RayChild(actor), on_progress)


def start_own_ray(num_cpus: int) -> None:
    """A Ray of this machine, without a dashboard. Ray gives its node 30 seconds to start, which is
    too few beside other work, and then raises a plain Exception: a second try is made."""
    import ray

    def start() -> None:
        ray.init(
            include_dashboard=False, num_cpus=num_cpus, logging_level=logging.WARNING,
            log_to_driver=True,
        )  # fmt: skip

    try:
        start()
    except Exception as error:
        logger.warning("Ray did not start (%s); trying once more", error)
        start()


def actor_options(settings: EngineSettings) -> dict[str, Any]:
    """What an engine needs of a node. The ranks of a tensor-parallel engine are on one node."""
    options: dict[str, Any] = {"num_cpus": 1}
    if settings.model.device != "cpu":
        import ray

        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if resources.get("GPU", 0) > 0 or settings.model.device == "cuda":
            options["num_gpus"] = settings.model.tensor_parallel_size
    return options
