"""The composition root of a simulation: the one place that builds the real scheduler and cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyroots.cache.cache import PrefixCache
from manyroots.cache.planes import CacheLayout
from manyroots.cache.quick_audit import QuickAudit
from manyroots.engine.loop import EngineLoop, EventSink
from manyroots.lora.audit import audit as audit_adapters
from manyroots.lora.residency import Residency
from manyroots.scheduler.audit import audit as audit_scheduler
from manyroots.scheduler.one_memory import OneMemory
from manyroots.scheduler.scheduler import Scheduler
from manyroots.scheduler.speculation import DraftSource
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
    memory: OneMemory | None
    """What pages and adapters share, if they do."""
    cache_audit: QuickAudit

    def audit(self) -> None:
        """Every invariant; raises AssertionError saying which does not hold."""
        self.cache_audit.audit()
        audit_adapters(self.adapters)
        audit_scheduler(self.scheduler.slices, self.scheduler.fetches)
        if self.memory is not None:
            self.memory.audit()


def build_engine(
    settings: SimulationSettings,
    runner: Runner,
    clock: Clock,
    page_bytes: int,
    events: EventSink | None = None,
    drafts: DraftSource | None = None,
    *,
    whole_audit_every: int = 1,
) -> SimulatedEngine:
    """`page_bytes`: of a page of all layers. `events`: told after each step which pages came and
    went. `drafts`: what guesses tokens, if the settings ask for it. `whole_audit_every`: see
    `QuickAudit`."""
    capacities, shared = settings.capacities(), settings.shared_sizes(page_bytes)
    if shared is not None:
        [pages] = capacities
        num_units = pages.num_device_units + shared.num_lent_units
        capacities = (replace(pages, num_device_units=num_units),)
    layout = CacheLayout.of(settings.block_size, capacities)
    policies = replace(settings.policies(), records_events=events is not None)
    cache = PrefixCache(layout, policies)
    adapters = Residency(settings.adapter_limits())
    memory = None if shared is None else OneMemory(cache, adapters, shared)
    scheduler = Scheduler(
        settings.scheduler(),
        cache,
        adapters,
        max_model_len=settings.num_cache_tokens,
        draft_source=drafts,
        memory=memory,
    )
    loop = EngineLoop(
        scheduler, runner, depth=settings.depth, events=events, now=lambda: clock.now_s
    )
    cache_audit = QuickAudit(cache, whole_audit_every)
    return SimulatedEngine(loop, scheduler, cache, adapters, memory, cache_audit)
