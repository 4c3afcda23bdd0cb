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
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe

NUM_ADAPTERS = 200
RECIPES = {
    f"n{index}": Recipe(rank=1 + index % 2, modules=("q_proj",), seed=index)
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
    most = adapter_bytes(queries, 2, 4) + 64 * 2 * len(queries)  # as stored: aligned pieces
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
