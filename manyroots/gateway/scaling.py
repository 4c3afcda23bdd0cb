"""Adds and removes replicas as the autoscaler decides (`routing/autoscaler.py`).

Looks at the load a few times within each delay. Replicas are started in parallel. One is removed at
a time, when its requests have ended; it stays if the load rises meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from manyroots.errors import ManyrootsError
from manyroots.messages import EngineInfo
from manyroots.routing.autoscaler import Autoscaler, ReplicaLoad, ScaleLimits

logger = logging.getLogger("manyroots")

_MAX_PAUSE_S = 1.0
_MIN_PAUSE_S = 0.05
_LOOKS_PER_DELAY = 4
TARGET_SHARE = 0.75
"""Of a replica's batch slots, where no target is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What users set of autoscaling."""

    min_replicas: int
    max_replicas: int
    target_requests: int | None = None
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0


class Scalable(Protocol):
    """Replicas as this module needs them."""

    @property
    def load(self) -> ReplicaLoad: ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_asleep(self) -> bool: ...

    async def add(self, count: int) -> None: ...

    async def remove(self, is_needed: Callable[[], bool]) -> None: ...


class Scaling:
    """Keeps the number of replicas where the autoscaler wants it."""

    def __init__(self, replicas: Scalable, options: ScaleOptions, info: EngineInfo) -> None:
        target = options.target_requests or max(1, int(TARGET_SHARE * info.max_num_seqs))
        self._replicas = replicas
        self._limits = ScaleLimits(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_requests=target,
            max_loras=info.max_loras,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        )
        self._autoscaler = Autoscaler(self._limits)
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        delay_s = min(self._limits.upscale_delay_s, self._limits.downscale_delay_s)
        pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, delay_s / _LOOKS_PER_DELAY))
        try:
            while True:
                await asyncio.sleep(pause_s)
                self._look()
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    def _look(self) -> None:
        replicas = self._replicas
        is_busy = self._task is not None and not self._task.done()
        if is_busy or replicas.is_paused or replicas.is_asleep:
            return
        num_replicas = replicas.load.num_replicas
        wanted = self._autoscaler.wanted(time.monotonic(), replicas.load)
        if wanted > num_replicas:
            self._task = asyncio.create_task(_logged(replicas.add(wanted - num_replicas)))
        elif wanted < num_replicas:
            self._task = asyncio.create_task(_logged(replicas.remove(self._are_all_needed)))

    def _are_all_needed(self) -> bool:
        load = self._replicas.load
        return self._autoscaler.need(load) >= load.num_replicas


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except ManyrootsError as error:
        logger.error("the number of replicas could not be changed: %s", error)
