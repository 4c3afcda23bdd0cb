"""Many adapters cost nothing until they are used, and then no more than the settings allow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.lora.targets import adapter_bytes
from manyroots.sampling import SamplingParams
from tests.helpers.adapter_engine import BLOCK_BYTES, AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe

NUM_ADAPTERS = 200
RANKS = (1, 2, 3, 8, 16)
RECIPES = {
    f"n{index}": Recipe(rank=RANKS[index % len(RANKS)], modules=("q_proj",), seed=index)
    for index in range(NUM_ADAPTERS)
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"), RECIPES)


class Opened:
    """Every file that Python opens below a folder while `watch` runs."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self.paths: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._folder is not None and event == "open":
            path = str(arguments[0])
            if path.startswith(self._folder):
                self.paths.append(path)

    def watch(self, folder: Path, work: Callable[[], None]) -> list[str]:
        self.paths, self._folder = [], str(folder)
        try:
            work()
        finally:
            self._folder = None
        return self.paths


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


def test_starting_opens_no_adapter_whatever_their_number(world: TinyWorld, opened: Opened) -> None:
    """W01: names are noted; with 200 the start opens the same files as with 2."""

    def start(count: int) -> None:
        modules = [f"{name}={world.path(name)}" for name in list(RECIPES)[:count]]
        settings = engine_settings(
            {
                "model": str(world.folder / "model"), "enable_lora": True, "max_loras": 2,
                "lora_modules": modules, "num_gpu_blocks_override": 64, "max_model_len": 64,
            }
        )  # fmt: skip
        build_engine(settings).loop.close()

    few = opened.watch(world.folder, lambda: start(2))
    many = opened.watch(world.folder, lambda: start(NUM_ADAPTERS))
    assert few, "the model's own files are there, too"
    assert many == few
    assert all(path.startswith(str(world.folder / "model")) for path in many)


def test_the_base_model_answers_without_any_adapter_being_read(world: TinyWorld) -> None:
    """W01, W18"""
    engine = AdapterEngine(world, names={name: name for name in RECIPES})
    assert len(engine.answer(1, [5, 6, 7])) == 8
    assert not engine.reads
    assert not engine.loader._host
    engine.close()


def test_memory_stays_within_the_limits_when_all_are_used_in_turn(world: TinyWorld) -> None:
    """W01, W11: slots and host copies never exceed --max-loras and --max-cpu-loras."""
    max_loras, max_cpu_loras = 2, 5
    engine = AdapterEngine(
        world, names={name: name for name in RECIPES}, max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
    )  # fmt: skip
    queries = {name: t for name, t in world.targets.items() if name.endswith("q_proj")}
    most = adapter_bytes(queries, max(RANKS), 4) + 64 * 2 * len(
        queries
    )  # as stored: aligned pieces
    for number, name in enumerate(RECIPES):
        engine.submit(number, [5, 6, 7], name, sampling=SamplingParams(max_tokens=1))
        engine.run()
        assert len(engine.tokens(number)) == 1
        assert len(engine.loader._host) <= max_cpu_loras
        assert 0 < engine.pool.used_bytes <= max_loras * most
    assert engine.reads == dict.fromkeys(RECIPES, 1)
    stats = engine.loop.stats().adapters
    assert stats is not None
    assert (stats.num_on_device, stats.num_on_host) == (max_loras, max_cpu_loras)
    for name in RECIPES:
        engine.unload(name)
    engine.run()
    engine.assert_nothing_of_adapters_is_left()
    engine.close()


def test_a02_a_step_has_256_rows_of_150_adapters_of_mixed_ranks(world: TinyWorld) -> None:
    """A01, A02, W17: each row's tokens are those of its adapter alone, and no adapter waits for
    another's slot."""
    names = list(RECIPES)[:150]
    few = SamplingParams(max_tokens=4, temperature=0)
    engine = AdapterEngine(
        world, names={name: name for name in names}, num_blocks=800, num_pages=600,
        max_num_seqs=256, budget=1024,
    )  # fmt: skip
    asked = [(names[number % 150], [5, number % 90, 7]) for number in range(256)]
    for _ in range(2):  # the first brings the weights, each as it comes
        for number, (name, prompt) in enumerate(asked):
            engine.submit(number, prompt, name, sampling=few)
        engine.run_with_quick_loads()
        given = {number: engine.tokens(number) for number in range(256)}
        engine.outputs.clear()
    assert max(engine.runner.num_adapters) == 150
    stats = engine.loop.stats().adapters
    assert stats is not None
    assert (stats.num_on_device, stats.total_device_evictions) == (150, 0)
    engine.close()
    alone = AdapterEngine(world, names={name: name for name in names}, max_loras=1, max_num_seqs=1)
    for number in range(0, 256, 17):
        name, prompt = asked[number]
        alone.submit(number, prompt, name, sampling=few)
        alone.run()
        assert alone.tokens(number) == given[number], f"{name} beside others"
    alone.close()


def test_a01_memory_for_few_is_shared_by_many_and_given_back(world: TinyWorld) -> None:
    """A01, W04: 60 adapters in memory for about ten; what is used never exceeds it."""
    names = list(RECIPES)[:60]
    num_blocks = 24
    engine = AdapterEngine(world, names={name: name for name in names}, num_blocks=num_blocks)
    for number, name in enumerate(names * 2):
        engine.submit(number, [5, 6, number % 90], name, sampling=SamplingParams(max_tokens=2))
        engine.step()
        assert engine.pool.used_bytes <= num_blocks * BLOCK_BYTES
    engine.run()
    assert all(len(engine.tokens(number)) == 2 for number in range(120))
    for name in names:
        engine.unload(name)
    engine.run()
    engine.assert_nothing_of_adapters_is_left()
    assert engine.residency.slots.num_free_blocks == num_blocks
    engine.close()
