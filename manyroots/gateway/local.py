"""Replicas as processes of this machine: `manyroots serve --replicas N`.

Each is a supervised engine process. On a machine with GPUs, each gets its own ones: as many as it
has ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from manyroots.config import EngineSettings
from manyroots.engine.adapter_table import AdapterTable
from manyroots.engine.child import Child
from manyroots.engine.process_client import ProcessClient
from manyroots.errors import ConfigError
from manyroots.gateway.replica_set import OnLife, OnPages, ReplicaSet
from manyroots.gateway.scaling import ScaleOptions
from manyroots.process.progress import Progress
from manyroots.routing.router import RoutingPolicy

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are and how they are watched."""

    num_replicas: int
    policy: RoutingPolicy = RoutingPolicy.EXPECTED_TTFT
    max_restarts: int = 0
    silence_s: float = 60.0
    scale: ScaleOptions | None = None
    """None: the number of replicas stays."""

    @property
    def max_replicas(self) -> int:
        return self.num_replicas if self.scale is None else self.scale.max_replicas


def local_replicas(
    settings: EngineSettings,
    options: ReplicaOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> ReplicaSet:
    """Engines of this machine with the same settings, not started yet."""
    devices = _devices(settings, options.max_replicas)
    return make_replicas(
        settings,
        options,
        lambda number: Child({_VISIBLE: devices[number]} if devices else None),
        on_progress,
    )


def make_replicas(
    settings: EngineSettings,
    options: ReplicaOptions,
    make_child: Callable[[int], Child],
    on_progress: Callable[[Progress], None],
) -> ReplicaSet:
    """Replicas whose processes `make_child` starts, by their number."""
    if settings.tiers.kv_events_config is not None:
        raise ConfigError(
            "--kv-events-config names one address, which --replicas engines can't share; start "
            "engines with addresses of their own, or leave it out."
        )
    settings = replace(settings, reports_pages=True)
    adapters = AdapterTable(settings.lora.lora_modules)

    def make(number: int, on_life: OnLife, on_pages: OnPages) -> ProcessClient:
        return ProcessClient(
            settings,
            adapters,
            max_restarts=options.max_restarts,
            on_progress=on_progress,
            make_child=lambda: make_child(number),
            hands_back=True,
            on_life=on_life,
            on_pages=on_pages,
        )

    return ReplicaSet(
        options.num_replicas,
        make,
        adapters,
        policy=options.policy,
        max_cpu_loras=settings.lora.max_cpu_loras,
        silence_s=options.silence_s,
        scale=options.scale,
    )


def _devices(settings: EngineSettings, num_replicas: int) -> list[str]:
    """The GPUs of each replica, as CUDA_VISIBLE_DEVICES has them; none on a machine without."""
    if settings.model.device == "cpu":
        return []
    named = os.environ.get(_VISIBLE)
    if named is not None:
        visible = [name for name in named.split(",") if name.strip()]
    else:
        visible = [str(i) for i in range(len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0)]
    if not visible:
        return []
    size = settings.model.tensor_parallel_size
    if num_replicas * size > len(visible):
        raise ConfigError(
            f"--replicas {num_replicas} with {size} GPU each need {num_replicas * size} GPUs, and "
            f"{len(visible)} are visible. Lower --replicas, or use --device cpu."
        )
    return [",".join(visible[i * size : (i + 1) * size]) for i in range(num_replicas)]
