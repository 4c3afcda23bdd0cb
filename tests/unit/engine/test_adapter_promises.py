"""What the engine promises of adapters, through real files, slots, weights and steps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from manyroots.config import engine_settings
from manyroots.engine.build import build_engine
from manyroots.ids import AdapterName, AdapterSlot, RequestId
from manyroots.kernels.lora_ops import torch_ops as lora_ops
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld, Watched
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S

RECIPES = {name: Recipe(rank=2, modules=("q_proj",), seed=i) for i, name in enumerate("abc")}
LEAST_S, MANY = 10.0, 200
"""So long at least, and as many times as long as steps take without a load, one is held up for
those that would wait. No longer: a step that waits must not be let off."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"), RECIPES)


@pytest.fixture
def engine(world: TinyWorld) -> Iterator[AdapterEngine]:
    engine = AdapterEngine(world, names={name: name for name in RECIPES})
    yield engine
    engine.close()


def test_w18_a_step_of_base_rows_is_given_no_adapters(
    engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W18: neither the layers nor the head, though adapters are in their slots; nor is it worked
    out which they would be."""
    given: list[bool] = []
    prepare, hidden, logits = lora_ops.prepare, engine.model.hidden, engine.model.logits

    def worked_out(*args: Any, **kwargs: Any) -> Any:
        given.append(True)
        return prepare(*args, **kwargs)

    def watched_layers(tokens: Any, step: Any) -> Any:
        given.append(step.lora is not None)
        return hidden(tokens, step)

    def watched_head(rows: Any, adapters: Any) -> Any:
        given.append(adapters is not None)
        return logits(rows, adapters)

    monkeypatch.setattr(lora_ops, "prepare", worked_out)
    monkeypatch.setattr(engine.model, "hidden", watched_layers)
    monkeypatch.setattr(engine.model, "logits", watched_head)
    engine.submit(1, [5, 6, 7], "a")
    engine.submit(2, [5, 6, 7])
    engine.run()
    assert any(given)
    assert engine.loop.stats().adapters.num_on_device == 1  # type: ignore[union-attr]
    given.clear()
    engine.submit(3, [8, 9, 10])
    engine.submit(4, [8, 9])
    engine.run()
    assert len(given) >= 16
    assert not any(given), "a step without adapters was given some"


def test_w20_a_load_holds_up_nobody_else(
    engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W20: base rows go on while an adapter is brought to the device, however long that takes."""
    is_base_done, waited = threading.Event(), []
    load = engine.pool.load
    engine.submit(3, [5, 6, 7])
    begin = time.monotonic()
    engine.run()
    patience_s = LEAST_S + MANY * (time.monotonic() - begin)

    def slow(slot: AdapterSlot, weights: AdapterWeights) -> None:
        waited.append(is_base_done.wait(patience_s))
        load(slot, weights)

    monkeypatch.setattr(engine.pool, "load", slow)
    engine.submit(1, [5, 6, 7], "a")
    engine.submit(2, [5, 6, 7])
    while not engine.is_over(2):
        engine.step()
    is_base_done.set()
    assert not engine.tokens(1)
    engine.run()
    assert waited == [True], "the step waited for the load"
    assert len(engine.tokens(1)) == 8


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_l05_the_servers_setting_limits_the_adapters_of_a_step(
    world: TinyWorld, max_loras: int
) -> None:
    """L05: three adapters are asked for without end; as many as the setting says run together,
    and never more."""
    settings: dict[str, Any] = {
        "model": str(world.folder / "model"), "enable_lora": True, "max_loras": max_loras,
        "lora_modules": [f"{name}={world.path(name)}" for name in RECIPES],
        "num_gpu_blocks_override": 64, "max_model_len": 64,
    }  # fmt: skip
    loop = build_engine(engine_settings(settings)).loop
    watched = loop._runner = Watched(loop._runner, 0)
    numbers = itertools.count()
    sampling = SamplingParams(max_tokens=12, temperature=0)

    def submit(name: str) -> None:
        number = RequestId(next(numbers))
        loop.handle(Submit(number, [5, 6], None, sampling, 0, (), AdapterName(name)))

    for name in 2 * [*RECIPES]:
        submit(name)
    deadline = time.monotonic() + PATIENCE_S
    while watched.num_adapters[max_loras] < 20:  # loads take as many steps as they take
        assert time.monotonic() < deadline, f"steps by adapters: {watched.num_adapters}"
        if not loop.has_work:
            loop.wait_for_read()
        for output in loop.step():
            assert output.error is None
            if output.finish_reason is not None:
                submit("abc"[int(output.request_id) % 3])
    loop.close()
    assert max(watched.num_adapters) == max_loras


@pytest.mark.parametrize("is_running", [False, True])
def test_w08_an_idle_engine_gives_an_unloaded_adapters_memory_back(
    engine: AdapterEngine, is_running: bool
) -> None:
    """W08: its slot and host copy, with no message and no request after the unload, also when the
    adapter's last request ends after that."""
    engine.submit(1, [5, 6, 7], "a")
    while not (engine.tokens(1) if is_running else engine.is_over(1)):
        engine.step()
    assert engine.pool.used_bytes > 0
    assert engine.loader._host
    engine.unload("a")
    engine.run()
    assert len(engine.tokens(1)) == 8
    engine.assert_nothing_of_adapters_is_left()


def test_l07_paused_requests_give_what_they_give_alone(
    engine: AdapterEngine, world: TinyWorld
) -> None:
    """L06, L07: real weights and pages; two of one adapter are paused for another's, whose weights
    take their slot meanwhile, and resume with the same tokens."""
    sampling = SamplingParams(max_tokens=40, temperature=0)
    asked = {1: ([5, 6, 7], "a"), 2: ([8, 9, 3, 4], "a"), 3: ([5, 6, 7], "b")}
    alone = {}
    for number, (prompt, name) in asked.items():
        engine.submit(number, prompt, name, sampling=sampling)
        engine.run()
        alone[number] = engine.tokens(number)
    slices = AdapterEngine(
        world, names={name: name for name in RECIPES}, max_loras=1, adapter_quantum_steps=2
    )
    slices.answer(4, [1, 2], "b")  # It is read now: those of `a` may be over before a slow read is.
    for number, (prompt, name) in asked.items():
        slices.submit(number, prompt, name, sampling=sampling)
        while name == "a" and not slices.tokens(number):
            if not slices.loop.has_work:
                slices.loop.wait_for_read()
            slices.step()
    slices.run_with_quick_loads()
    assert slices.loop.stats().total_pauses >= 2
    assert {number: slices.tokens(number) for number in asked} == alone
    slices.close()
