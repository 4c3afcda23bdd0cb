"""How adapters come, wait and go, through real files, slots, weights and steps; what a request says
is compared with PEFT. Only plans and outcomes are looked at: how turns are given is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from manyroots.ids import AdapterName, AdapterSlot, Tier
from manyroots.sampling import SamplingParams
from manyroots.step import DropAdapter, LoadAdapter, Plan, StepResult
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_engine import AdapterEngine, TinyWorld
from tests.helpers.adapter_folders import Recipe
from tests.helpers.patience import PATIENCE_S

NAMES = ("a", "b", "c")
RECIPES = {
    name: Recipe(rank=4, modules=("q_proj", "v_proj", "o_proj"), scale=0.5, seed=seed)
    for seed, name in enumerate(NAMES)
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
FORMS = {
    "plain": Recipe(rank=4, modules=("q_proj", "v_proj"), scale=0.5, seed=10),
    "rank-stabilised": Recipe(
        rank=4, modules=("q_proj", "v_proj"), scale=0.5, seed=10, is_rank_stabilised=True
    ),
    "ranks": Recipe(rank=4, ranks={Q_PROJ: 2}, modules=("q_proj", "v_proj"), scale=0.5, seed=11),
    "alphas": Recipe(
        rank=4, modules=("q_proj", "v_proj"), scale=0.5, seed=10,
        config={"alpha_pattern": {"q_proj": 2.0}},
    ),
    "every-module": Recipe(rank=3, scale=0.4, seed=12),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return TinyWorld(tmp_path_factory.mktemp("world"), RECIPES | FORMS)


class Kept:
    """A runner that keeps every plan."""

    def __init__(self, engine: AdapterEngine) -> None:
        self._runner = engine.loop._runner
        self.plans: list[Plan] = []
        engine.loop._runner = self

    def launch(self, plan: Plan) -> Future[StepResult]:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def start(world: TinyWorld) -> Iterator[Any]:
    made: list[AdapterEngine] = []

    def start(**settings: Any) -> tuple[AdapterEngine, list[Plan]]:
        engine = AdapterEngine(world, names={name: name for name in NAMES}, **settings)
        made.append(engine)
        return engine, Kept(engine).plans

    yield start
    for engine in made:
        engine.close()


def asked_for(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def assert_pefts(
    world: TinyWorld, engine: AdapterEngine, asked: dict[int, tuple[list[int], str]], count: int
) -> None:
    """Each answer has so many tokens, the likeliest by PEFT."""
    for number, (prompt, name) in asked.items():
        base = AutoModelForCausalLM.from_pretrained(
            world.folder / "model", dtype=torch.float32, local_files_only=True
        )
        model = PeftModel.from_pretrained(base, world.path(name))
        answer = engine.tokens(number)
        assert len(answer) == count
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def step_until(engine: AdapterEngine, numbers: Sequence[int]) -> None:
    """Until each of them has a token."""
    while not all(engine.tokens(number) for number in numbers):
        if not engine.loop.has_work:
            engine.loop.wait_for_read()
        engine.step()


def test_l04_a_held_back_request_causes_no_empty_plan_no_retraction_and_no_busy_loop(
    world: TinyWorld, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L04: with a cap of one, B is held back while A runs, then waits for its load, which is slow.
    Every plan computes, moves something or waits; while nothing can be computed, each waits;
    nothing is retracted, and both say what they say by PEFT."""
    engine, plans = start(max_loras=1, adapter_quantum_steps=1000)
    engine.answer(9, [7, 8], "a")
    is_begun, go_on = threading.Event(), threading.Event()
    load = engine.pool.load

    def slow(slot: AdapterSlot, weights: AdapterWeights) -> None:
        is_begun.set()
        assert go_on.wait(PATIENCE_S)
        load(slot, weights)

    monkeypatch.setattr(engine.pool, "load", slow)
    plans.clear()
    asked = {1: ([5, 6, 7], "a"), 2: ([5, 6, 8], "b"), 3: ([3, 4], "b")}
    for number, (prompt, name) in asked.items():
        engine.submit(number, prompt, name, sampling=asked_for(12))
    while not engine.is_over(1):
        engine.step()
        assert not engine.tokens(2), "the cap let two adapters run"
    while not is_begun.is_set():
        engine.step()
    engine.step()
    num_plans = len(plans)
    for _ in range(4):
        engine.step()
    assert len(plans) > num_plans
    assert all(plan.waits for plan in plans[num_plans:]), "a step that does not wait for the load"
    go_on.set()
    engine.run()
    for plan in plans:
        assert len(plan.rows) or plan.copies or plan.adapters or plan.waits, "an empty plan"
    assert sum(not plan.waits for plan in plans) < 12 + 12 + 10
    assert engine.loop.stats().total_retractions == 0
    assert_pefts(world, engine, asked, 12)


def slot_bytes(engine: AdapterEngine) -> list[Tensor]:
    """What the device has of adapters, slot by slot."""
    pool, size = engine.pool._pool, engine.pool._region
    num_slots = engine.residency.limits.num_slots or 0
    return [pool[slot * size : (slot + 1) * size].clone() for slot in range(num_slots)]


def test_w02_adapters_of_a_step_are_loaded_before_any_of_them_has_a_slot_to_run_in(
    world: TinyWorld, start: Any
) -> None:
    """W02: two cold adapters come in one step: their loads are in one plan, into slots of their
    own, and no row names a slot before its load was answered. More than the cap for a step is
    refused before a byte, a count or an intent changes."""
    engine, plans = start(max_loras=2)
    for number, name in enumerate(NAMES, start=90):  # so that all files are read
        engine.answer(number, [7, 8], name)
    plans.clear()
    asked = {1: ([5, 6, 7], "a"), 2: ([5, 6, 8], "b")}
    for number, (prompt, name) in asked.items():
        engine.submit(number, prompt, name, sampling=asked_for(12))
    engine.run()
    loads = [[i for i in plan.adapters if isinstance(i, LoadAdapter)] for plan in plans]
    assert [len(each) for each in loads if each] in ([2], [1]), "b may be there from before"
    [together] = [each for each in loads if each]
    slots = [load.target.slot for load in together if load.target is not None]
    assert len(set(slots)) == len(together)
    first = next(at for at, each in enumerate(loads) if each)
    for plan in plans[: first + 1]:
        assert not {a.adapter_slot for a in plan.arrivals} & set(slots)
    used = [{a.adapter_slot for a in plan.arrivals} - {None} for plan in plans]
    assert set.union(*used) == {0, 1}
    # No step may want three.
    residency = engine.residency
    digests = [residency.registry.loaded[AdapterName(name)].digest for name in NAMES]
    before, bytes_before = (residency.stats(), residency.has_intents), slot_bytes(engine)
    with pytest.raises(RuntimeError, match="wants 3 adapters; --max-loras allows 2"):
        residency.prepare(digests[::-1])
    assert (residency.stats(), residency.has_intents) == before
    for now, then in zip(slot_bytes(engine), bytes_before, strict=True):
        assert torch.equal(now, then)
    asked[3] = ([6, 5], "c")
    engine.submit(3, *asked[3], sampling=asked_for(12))
    engine.run()
    assert_pefts(world, engine, asked, 12)


def test_w05_a_retracted_request_of_an_unloading_adapter_resumes_with_it(
    world: TinyWorld, start: Any
) -> None:
    """W05: too few pages for three that grow; the adapter is unloaded while they run, before any is
    retracted, and another takes slots meanwhile. All end with the tokens of its weights, and then
    nothing of it is left."""
    engine, plans = start(num_pages=16, max_loras=1, max_cpu_loras=1)
    asked = {number: ([number, 5, 6, 7, 8], "a") for number in (1, 2, 3)}
    for number, (prompt, name) in asked.items():
        engine.submit(number, prompt, name, sampling=asked_for(24))
    step_until(engine, list(asked))
    assert engine.loop.stats().total_retractions == 0
    engine.unload("a")
    engine.submit(4, [5, 6], "b", sampling=asked_for(4))
    engine.step()
    plans.clear()
    engine.run()
    assert engine.loop.stats().total_retractions > 0
    resumed = [a for plan in plans for a in plan.arrivals if int(a.request_id) in asked]
    assert resumed, "nothing resumed after the unload"
    assert_pefts(world, engine, asked, 24)
    assert_pefts(world, engine, {4: ([5, 6], "b")}, 4)
    for name in ("b", "c"):
        engine.unload(name)
    engine.run()
    engine.assert_nothing_of_adapters_is_left()


def test_w07_a_deferred_unload_leaves_a_slot_that_has_another_owner(
    world: TinyWorld, start: Any
) -> None:
    """W07: A was on the device and has lost its slot to B, which runs. A is unloaded while a
    request of it waits; when that ends the unload is carried out, and the slot has every byte that
    B had there."""
    engine, plans = start(max_loras=1, adapter_quantum_steps=1000)
    engine.answer(9, [7, 8], "a")
    asked = {1: ([5, 6, 7], "b")}
    engine.submit(1, *asked[1], sampling=asked_for(24))
    step_until(engine, [1])
    engine.submit(2, [5, 6, 8], "a", sampling=asked_for(4))
    engine.step()
    digest = engine.residency.registry.loaded[AdapterName("a")].digest
    engine.unload("a")
    for _ in range(3):
        engine.step()
    assert not engine.tokens(2), "it did not wait"
    before = slot_bytes(engine)
    plans.clear()
    engine.abort(2)
    while digest in engine.residency.registry.contents or engine.residency.has_intents:
        engine.step()
    engine.step()
    assert not engine.is_over(1), "the unload was not carried out while B ran"
    drops = [i for plan in plans for i in plan.adapters if isinstance(i, DropAdapter)]
    assert {drop.tier for drop in drops if drop.digest == digest} == {Tier.HOST}
    for now, then in zip(slot_bytes(engine), before, strict=True):
        assert torch.equal(now, then)
    engine.run()
    assert_pefts(world, engine, asked, 24)
    for name in ("b", "c"):
        engine.unload(name)
    engine.run()
    engine.assert_nothing_of_adapters_is_left()


def test_w13_w14_scalings_ranks_and_modules_are_pefts(world: TinyWorld) -> None:
    """W13, W14: plain and rank-stabilised scaling, a rank and an alpha of a module's own, and every
    module with embedding and head, side by side in the same steps."""
    engine = AdapterEngine(world, names={name: name for name in FORMS}, max_loras=len(FORMS))
    prompt = [5, 6, 7, 11, 40]
    asked = {number: (prompt, name) for number, name in enumerate(FORMS, start=1)}
    for number, name in enumerate(FORMS, start=20):
        engine.answer(number, [1, 2], name)  # all are loaded before the first step of the others
    for number, (_, name) in asked.items():
        engine.submit(number, prompt, name, sampling=asked_for(16))
    engine.submit(9, prompt, sampling=asked_for(16))
    engine.run()
    assert engine.runner.num_adapters[len(FORMS)], "they never ran together"
    assert_pefts(world, engine, asked, 16)
    assert len({tuple(engine.tokens(number)) for number in (*asked, 9)}) == len(FORMS) + 1
    engine.close()
