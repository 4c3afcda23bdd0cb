"""The composition root of a simulation: the one place that builds the real scheduler and cache."""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.planes import Capacity, Layout
from manyroots.cache.policies import CachePolicies
from manyroots.engine.loop import EngineLoop
from manyroots.lora.limits import Limits
from manyroots.lora.residency import Residency
from manyroots.scheduler.scheduler import Scheduler
from manyroots.simulate.settings import SimulationSettings
from manyroots.step import Runner


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The engine's own loop around the real scheduler and cache."""

    loop: EngineLoop
    cache: PrefixCache

    def audit(self) -> None:
        """Every invariant; raises AssertionError saying which does not hold."""
        audit(self.cache)


def build_engine(settings: SimulationSettings, runner: Runner) -> SimulatedEngine:
    assert settings.num_pages is not None
    cache = PrefixCache(
        Layout.of(settings.block_size, (Capacity(FULL_ATTENTION, settings.num_pages),)),
        CachePolicies(reuse=settings.enable_prefix_caching),
    )
    adapters = Residency(Limits(max_loras=0, max_cpu_loras=0))
    scheduler = Scheduler(settings.scheduler(), cache, adapters, max_model_len=settings.num_slots)
    return SimulatedEngine(EngineLoop(scheduler, runner, depth=settings.depth), cache)
