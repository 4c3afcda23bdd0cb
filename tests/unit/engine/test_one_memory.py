"""Pages and adapters in one memory, through the real engine with real bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from manyroots.config import engine_settings
from manyroots.engine.adapter_runtime import CPU_BLOCK_BYTES
from manyroots.errors import ConfigError
from manyroots.ids import Tier
from manyroots.simulate.costs import with_costs
from manyroots.simulate.faults import NO_FAULTS
from manyroots.simulate.presets import preset
from manyroots.simulate.settings import BLOCK_BYTES, SimulationSettings
from manyroots.simulate.simulation import EngineSimulation
from manyroots.simulate.trace import EndsBy, TraceRequest, TraceSegment
from tests.helpers.real_engine import MAX_LEN, PAGE, RealEngine, RealWorld, text

NUM_PAGES = 160
SETTINGS = {"num_gpu_blocks_override": NUM_PAGES, "max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    world = RealWorld(tmp_path_factory.mktemp("world"), "full", num_hidden_layers=3)
    yield world
    world.close()


def with_one_block(world: RealWorld) -> RealEngine:
    """Adapters have memory for one of them at start; each takes one block."""
    engine = RealEngine(world, **SETTINGS, adapter_memory_bytes=CPU_BLOCK_BYTES)
    adapters = engine.scheduler.adapters
    _fix_costs(engine.cache, adapters)
    assert [adapters.num_blocks(engine._digests[name]) for name in "abc"] == [1, 1, 1]
    assert adapters.slots.num_blocks == 1
    return engine


def test_a01_memory_moves_from_pages_to_adapters_and_back(world: RealWorld) -> None:
    """Three adapters run at once where adapters had memory for one; then pages take the memory of
    adapters that no request uses. Tokens are those of an engine with room for all, each page has
    the numbers of its own tokens and weights, and every step is audited."""
    roomy = RealEngine(world, **SETTINGS)
    engine = with_one_block(world)
    prompts = {name: text(seed, 20) for seed, name in enumerate("abc")}
    numbers = {name: engine.submit(prompt, name) for name, prompt in prompts.items()}
    engine.run()
    for name, prompt in prompts.items():
        assert engine.said[numbers[name]].tokens == roomy.ask(prompt, name).tokens
    memory, slots = engine.scheduler._memory, engine.scheduler.adapters.slots
    assert slots.num_blocks == len(slots.by_owner) == 3
    assert memory.total_lent_units > 0
    assert engine.check_units() > 0

    num_pages = engine.cache.index.pools[0].num_units
    for seed in range(6):
        prompt = text(50 + seed, MAX_LEN - 10)
        assert engine.ask(prompt).tokens == roomy.ask(prompt).tokens
    assert memory.total_returned_units > 0
    assert slots.num_blocks < 3
    assert engine.cache.index.pools[0].num_units > num_pages
    assert engine.check_units() > 0
    for name, prompt in prompts.items():  # each adapter comes back
        assert engine.ask(prompt, name).tokens == roomy.ask(prompt, name).tokens
    engine.close()
    roomy.close()


def test_a01_lent_pages_give_their_memory_back(world: RealWorld) -> None:
    """Real bytes: the system has taken the memory of lent pages, which read as zeros."""
    engine = with_one_block(world)
    engine.ask(text(1, MAX_LEN - 10))
    pool = engine.cache.index.pools[0]
    before = set(pool.lent_units().tolist())
    data = engine.runner._arenas[0].data
    data.fill_(1.0)
    engine.cache.evict_all()
    numbers = [engine.submit(text(seed, 12), name) for seed, name in enumerate("bc")]
    engine.run()
    assert all(engine.said[number].error is None for number in numbers)
    lent = set(pool.lent_units().tolist()) - before
    num_zeros = sum(not data[unit].any() for unit in lent)
    # All but units that share a page of the system's memory with others, at the ends of a run.
    assert num_zeros >= len(lent) - 4
    assert num_zeros > 10
    engine.close()


STEPS = [
    ("a", "x", 20), ("b", "y", 20), (None, "p", 150), ("c", "z", 20), (None, "q", 150),
    (None, "r", 150), ("a", "x", 20), (None, "p", 150), (None, "s", 150), (None, "t", 150),
    ("b", "y", 20), ("c", "v", 40), (None, "q", 150), ("a", "w", 20), ("b", "y", 20),
]  # fmt: skip
"""Requests one after the other: adapter, prompt by name, and its length."""


def _seen(adapters: Any, memory: Any) -> tuple[Any, ...]:
    names = [adapters.registry.name_of(digest) for digest in adapters.slots.by_owner]
    return tuple(sorted(names)), memory.total_lent_units, memory.total_returned_units


def _fix_costs(cache: Any, adapters: Any) -> None:
    """Prices must not depend on how fast either machine is."""
    cache.costs.page_s = lambda *_, **__: 1.0
    adapters.transfers.load_seconds[Tier.HOST].note = lambda *_: None


def test_a01_the_simulator_evicts_in_the_order_of_the_engine(world: RealWorld) -> None:
    """The same requests leave the same adapters on the device, after as many pages were lent and
    returned, and find as many tokens, one request after the other."""
    engine = with_one_block(world)
    memory, adapters = engine.scheduler._memory, engine.scheduler.adapters
    for name in "abc":  # the order of registration is the trace's
        engine.ask(text(900, 1), name, max_tokens=1)
    served = []
    for adapter, name, length in STEPS:
        prompt = text(sum(map(ord, name)), length)
        number = engine.submit(prompt, adapter, max_tokens=4)
        while engine.loop.has_work:
            engine.step()
            engine.finish_loads()
        served.append((engine.said[number].num_cached, *_seen(adapters, memory)))

    factor = BLOCK_BYTES // CPU_BLOCK_BYTES
    first = [("a", "n", 1), ("b", "n", 1), ("c", "n", 1)]
    trace = tuple(
        TraceRequest(
            arrival_s=float(number), prompt=(TraceSegment(name, length),), adapter=adapter,
            salt=None, output_tokens=4 if length > 1 else 1, ends_by=EndsBy.LENGTH,
        )
        for number, (adapter, name, length) in enumerate([*first, *STEPS])
    )  # fmt: skip
    unit_bytes = memory._unit_bytes
    costs = with_costs(
        preset("round-numbers").costs,
        {"kv_bytes_per_token": factor * unit_bytes / PAGE, "adapter_bytes": BLOCK_BYTES - 1},
    )
    settings = SimulationSettings(
        block_size=PAGE, num_pages=NUM_PAGES, max_num_batched_tokens=64, max_num_seqs=8,
        adapter_memory_bytes=BLOCK_BYTES, one_memory=True, max_model_len=MAX_LEN,
    )  # fmt: skip
    lent = engine.cache.index.pools[0].num_lent + memory.total_returned_units
    lent -= memory.total_lent_units
    settings = replace(settings, adapter_memory_bytes=float(lent * factor * unit_bytes))
    simulation = EngineSimulation(trace, settings, costs, 0, NO_FAULTS, audit=True)
    simulated_memory, simulated_adapters = simulation.engine.memory, simulation.engine.adapters
    _fix_costs(simulation.engine.cache, simulated_adapters)
    simulation.receive_trace(trace)
    simulated = []
    for number in range(len(trace)):
        simulation.advance_to(number + 0.99)
        record = list(simulation.records.values())[-1]
        state = _seen(simulated_adapters, simulated_memory)
        simulated.append((record.num_cached_tokens, *state))
    assert simulated[len(first) :] == served
    assert served[-1][2] > served[0][2], "pages were lent"
    assert served[-1][3] > served[0][3], "and came back"
    engine.close()


def test_a01_a_size_for_adapters_and_slots_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--adapter-memory-bytes is 5, and --max-loras 2"):
        engine_settings({"model": "m", "enable_lora": True, "max_loras": 2,
                         "adapter_memory_bytes": 5})  # fmt: skip
