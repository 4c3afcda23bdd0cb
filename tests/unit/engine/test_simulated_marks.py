"""Marked traffic through the simulator and through the real engine (T13)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyroots.cache.events import CacheEvent, PagesRemoved
from manyroots.messages import KeepRange, Retention
from manyroots.simulate.faults import NO_FAULTS
from manyroots.simulate.presets import preset
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import EngineSimulation, simulate
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest
from tests.helpers.real_engine import (
    MAX_LEN,
    PAGE,
    RealEngine,
    RealWorld,
    events_to,
    paths_of,
    text,
)

NUM_PAGES = MAX_LEN // PAGE
NUM_SEQS, NUM_TOKENS = 4, 24


def marked_traffic() -> Trace:
    """Ten documents, each asked about again and again, one request a second; a third of the
    requests mark them, for two tenants. Marks end between requests."""
    rng = random.Random(39)
    lines = []
    for second in range(80):
        number = rng.randrange(10)
        length = (3 + number) * PAGE
        prompt = text(number, length) + text(1000 + rng.randrange(20), rng.randrange(1, 3 * PAGE))
        retention = None
        if rng.random() < 0.35:
            ranges = [KeepRange(length, rng.choice((20, 50, 80)), rng.randrange(3, 20) + 0.5)]
            if rng.random() < 0.3:
                ranges.append(KeepRange(2 * PAGE, 90, 30.5))
            retention = Retention(tuple(ranges), rng.choice(("one", None)), 0.4)
        lines.append(
            TraceRequest(
                arrival_s=float(second),
                prompt=tuple(prompt),
                adapter=None,
                salt=None,
                output_tokens=1,
                ends_by=EndsBy.LENGTH,
                retention=retention,
            )
        )
    return tuple(lines)


def removed(events: Sequence[CacheEvent]) -> list[bytes]:
    """Evicted pages in order, each by all tokens up to its end: hashes differ, because they name
    the model as well."""
    paths = paths_of(events)
    gone = [page for event in events if isinstance(event, PagesRemoved) for page in event.hashes]
    return [b"".join(tokens for _, tokens in paths[page]) for page in gone]


class Heard:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[CacheEvent] = []

    def publish(self, events: Sequence[CacheEvent]) -> None:
        self.events += events

    def close(self) -> None:
        pass


def served(world: RealWorld, trace: Trace, folder: Path) -> tuple[list[int], list[bytes]]:
    """Cached tokens of each request, and what was evicted, by the real engine."""
    engine = RealEngine(
        world, names=(), num_gpu_blocks_override=NUM_PAGES, max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_TOKENS, kv_events_config=events_to(folder),
    )  # fmt: skip
    assert engine.cache.layout.device[0].num_units == NUM_PAGES
    now = [0.0]
    engine.loop._now = lambda: now[0]
    found = []
    for line in trace:
        now[0] = line.arrival_s
        prompt = line.prompt_tokens().tolist()
        found.append(engine.ask(prompt, max_tokens=1, retention=line.retention).num_cached)
    engine.close()
    return found, removed(engine.events)


def simulated(trace: Trace) -> tuple[list[int], list[bytes]]:
    """The same of the simulator."""
    settings = SimulationSettings(
        block_size=PAGE, num_pages=NUM_PAGES, max_num_batched_tokens=NUM_TOKENS,
        max_num_seqs=NUM_SEQS,
    )  # fmt: skip
    heard, costs = Heard(), preset("round-numbers").costs
    simulation = EngineSimulation(trace, settings, costs, 0, NO_FAULTS, True, heard)
    simulation.receive_trace(trace)
    simulation.advance_to(math.inf)
    found = [record.num_cached_tokens for record in simulation.records.values()]
    return found, removed(heard.events)


def test_t13_the_simulator_evicts_marked_traffic_in_the_order_of_the_engine(
    worlds: Any, tmp_path: Path
) -> None:
    """T13: page by page. Marks decide the order: without them it differs."""
    trace = marked_traffic()
    found, gone = served(worlds("full"), trace, tmp_path)
    assert len(gone) > 100
    assert simulated(trace) == (found, gone)
    plain = tuple(replace(line, retention=None) for line in trace)
    assert simulated(plain)[1] != gone


def test_t13_marks_beside_small_tiers_keep_no_request_waiting() -> None:
    """T13: requests wait for room while marked pages go to a small host tier and to storage; every
    step is audited, and all requests end."""
    trace = tuple(
        replace(line, arrival_s=line.arrival_s / 50, output_tokens=8) for line in marked_traffic()
    )
    for num_host_pages in (4, 10, 20):
        settings = SimulationSettings(
            block_size=PAGE, num_pages=20, max_num_batched_tokens=NUM_TOKENS,
            max_num_seqs=NUM_SEQS, num_host_pages=num_host_pages, storage=True,
        )  # fmt: skip
        run = simulate(trace, settings, preset("round-numbers").costs, seed=0, audit=True)
        assert len(run.records) == len(trace)
