"""Cold adapters through a real engine: they are read side by side, and streams go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from manyroots.sampling import SamplingParams
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S

NAMES = ("a", "b", "c")
STREAM, PROMPT = 10, [5, 2, 7, 11]
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
NUM_STEPS = 8


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[AdapterEngine]:
    recipes = {name: Recipe(rank=2, seed=number) for number, name in enumerate(NAMES)}
    world = TinyWorld(tmp_path, recipes)
    made = AdapterEngine(world, names={name: name for name in NAMES}, max_loras=3)
    yield made
    made.close()


def test_a03_three_cold_adapters_take_no_step_from_a_stream(engine: AdapterEngine) -> None:
    """A03: neither while files are read, nor while weights come to the device, nor while the cold
    prompts are computed. Each step still gives the stream its token."""
    reading = threading.Barrier(len(NAMES) + 1)
    may_read, may_load = threading.Event(), threading.Event()
    loading = threading.Semaphore(0)
    load = engine.pool.load

    def read() -> None:
        reading.wait(PATIENCE_S)  # all three at once, or never
        assert may_read.wait(PATIENCE_S)

    def slow_load(*args: object) -> None:
        loading.release()
        assert may_load.wait(PATIENCE_S)
        load(*args)  # type: ignore[arg-type]

    engine.before_read = read
    engine.submit(STREAM, PROMPT, sampling=LONG)
    while not engine.tokens(STREAM):
        engine.step()
    with mock.patch.object(engine.pool, "load", slow_load):
        for number, name in enumerate(NAMES):
            engine.submit(number, PROMPT, name)
        reading.wait(PATIENCE_S)
        _step_stream(engine, NUM_STEPS)
        assert not any(engine.tokens(number) for number in range(len(NAMES)))
        may_read.set()
        while engine.loop.is_reading:
            engine.loop.wait_for_read()
            _step_stream(engine, 1)
        assert loading.acquire(timeout=PATIENCE_S)
        _step_stream(engine, NUM_STEPS)
        assert engine.residency.transfers.num_slot_loads == len(NAMES)
        assert not any(engine.tokens(number) for number in range(len(NAMES)))
        may_load.set()
        engine.finish_loads()
    _step_stream(engine, 4)
    assert all(engine.tokens(number) for number in range(len(NAMES))), "a cold prompt waited"
    engine.run()
    together = [engine.tokens(number) for number in range(len(NAMES))]
    alone = [engine.answer(20 + number, PROMPT, name) for number, name in enumerate(NAMES)]
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == len(NAMES)


def _step_stream(engine: AdapterEngine, num_steps: int) -> None:
    """Each step gives the stream one token."""
    for _ in range(num_steps):
        before = len(engine.tokens(STREAM))
        engine.step()
        assert len(engine.tokens(STREAM)) == before + 1
