"""The composition root of a simulation: the one place that builds the real scheduler and cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.planes import CacheLayout
from manyroots.engine.loop import EngineLoop, EventSink
from manyroots.lora.audit import audit as audit_adapters
from manyroots.lora.residency import Residency
from manyroots.scheduler.audit import audit as audit_scheduler
from manyroots.scheduler.scheduler import Scheduler
from manyroots.simulate.clock import Clock
from manyroots.simulate.settings import SimulationSettings
from manyroots.step import Runner


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The engine's own loop around the real scheduler and cache."""

    loop: EngineLoop
    scheduler: Scheduler
    cache: PrefixCache
    adapters: Residency

    def audit(self) -> None:
        """Every invariant; raises AssertionError saying which does not hold."""
        audit(self.cache)
        audit_adapters(self.adapters)
        audit_scheduler(self.scheduler.slices, self.scheduler.fetches)


def build_engine(
    settings: SimulationSettings, runner: Runner, clock: Clock, events: EventSink | None = None
) -> SimulatedEngine:
    """`events`: told after each step which pages came and went."""
    layout = CacheLayout.of(settings.block_size, settings.capacities())
    policies = replace(settings.policies(), records_events=events is not None)
    cache = PrefixCache(layout, policies)
    adapters = Residency(settings.adapter_limits())
    scheduler = Scheduler(
        settings.scheduler(), cache, adapters, max_model_len=settings.num_cache_tokens
    )
    loop = EngineLoop(
        scheduler, runner, depth=settings.depth, events=events, now=lambda: clock.now_s
    )
    return SimulatedEngine(loop, scheduler, cache, adapters)
