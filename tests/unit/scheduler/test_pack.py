"""The pack policy (L08): adapters are loaded less often than by order of arrival, and fewer of them
run at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manyroots.bench.adapter_slices import CASES, SlicesCase, SlicesRun
from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.policies.pack import PATIENCE_STEPS, ROW_PATIENCE_STEPS
from tests.helpers.scheduler_harness import SchedulerHarness, submit

NUM_REQUESTS = 240


def make(policy: str, *, num_adapters: int, cap: int, rows: int) -> SchedulerHarness:
    engine = SchedulerHarness(
        policy=policy, max_loras=cap, max_num_seqs=rows, num_pages=256, budget=64, reuse=False
    )
    for number in range(num_adapters):
        name, digest = AdapterName(str(number)), AdapterDigest(str(number).encode())
        engine.scheduler.load_adapter(name, AdapterSpec(digest, 8, 100), path=str(number))
    return engine


def run(policy: str, seed: int) -> tuple[int, dict[str, dict[int, int]]]:
    """How often adapters were loaded, and for the requests of each the step of its first token;
    with 30 requests outstanding all the time."""
    rng = random.Random(seed)
    num_adapters, cap = rng.choice([(12, 3), (20, 4), (8, 2)])
    engine = make(policy, num_adapters=num_adapters, cap=cap, rows=rng.choice([2, 6]))
    began: dict[str, dict[int, int]] = {}
    adapters: dict[int, str] = {}
    number = num_outstanding = 0
    while number < NUM_REQUESTS or engine.loop.has_work:
        while number < NUM_REQUESTS and num_outstanding < 30:
            adapters[number] = str(int(num_adapters * rng.random() ** 2))
            max_tokens = rng.randint(1, 12)
            prompt = [number % 50, number // 50, 3]
            engine.loop.handle(
                submit(number, prompt, max_tokens=max_tokens, adapter=adapters[number])
            )
            number += 1
            num_outstanding += 1
        for output in engine.loop.step():
            request_id = int(output.request_id)
            began.setdefault(adapters[request_id], {}).setdefault(request_id, num_steps(engine))
            num_outstanding -= output.finish_reason is not None
    stats = engine.scheduler.stats().adapters
    assert stats is not None
    return stats.total_loads_from_host + stats.total_loads_from_storage, began


@pytest.mark.parametrize("seed", range(5))
def test_l08_packing_loads_adapters_less_often(seed: int) -> None:
    """L08: more adapters than the cap. Within an adapter the order of arrival is kept."""
    by_arrival, _ = run("fcfs", seed)
    packed, began = run("pack", seed)
    assert packed < 0.85 * by_arrival
    assert sum(len(line) for line in began.values()) == NUM_REQUESTS
    for steps in began.values():
        by_arrival_order = [steps[number] for number in sorted(steps)]
        assert by_arrival_order == sorted(by_arrival_order)


def num_steps(engine: SchedulerHarness) -> int:
    return engine.scheduler.stats().total_steps


def test_l08_packing_starves_nobody() -> None:
    """L08, L06: adapters 0 and 1 always have requests that wait; that of adapter 2 begins when its
    patience is over."""
    rng = random.Random(1)
    engine = make("pack", num_adapters=3, cap=2, rows=8)
    number = 0
    first_step = None
    while first_step is None or num_steps(engine) - first_step < PATIENCE_STEPS + 20:
        while len(engine.scheduler._admission.waiting) < 6:
            name = str(number % 2)
            max_tokens = rng.randint(10, 60)
            engine.loop.handle(
                submit(number, [number % 50, 1], max_tokens=max_tokens, adapter=name)
            )
            number += 1
        if first_step is None and num_steps(engine) > 20:
            first_step = num_steps(engine)
            engine.loop.handle(submit(10_000, [7, 7], max_tokens=2, adapter="2"))
        if any(int(output.request_id) == 10_000 for output in engine.loop.step()):
            return
    raise AssertionError("adapter 2 was starved")


def on_device(policy: str, num_adapters: int, rows: int, num_pages: int = 64) -> SchedulerHarness:
    """An engine that has all its adapters on the device."""
    engine = SchedulerHarness(
        policy=policy, max_loras=num_adapters, max_num_seqs=rows, depth=0, reuse=False,
        num_pages=num_pages,
    )  # fmt: skip
    for number in range(num_adapters):
        name, digest = AdapterName(str(number)), AdapterDigest(str(number).encode())
        engine.scheduler.load_adapter(name, AdapterSpec(digest, 8, 100), path=str(number))
        engine.loop.handle(submit(1000 + number, [9], max_tokens=1, adapter=str(number)))
        engine.run()
    return engine


def test_l08_who_comes_while_its_adapter_has_its_turn_is_of_its_next_group() -> None:
    """L08: with endless requests of one adapter, no other request waits for longer than a group
    takes."""
    engine = on_device("pack", 2, 1)
    for number, name in enumerate("0101"):
        engine.loop.handle(submit(number, [number], max_tokens=1, adapter=name))
    engine.step()
    for number in range(4, 20):
        engine.loop.handle(submit(number, [number], max_tokens=1, adapter="0"))
    engine.run()
    order = [number for number in engine.outputs if number < 1000]
    assert order == [0, 2, 1, 3, *range(4, 20)]


def test_l08_who_was_retracted_goes_on_before_the_group() -> None:
    """L08: a stream does not pause till all that wait for another adapter have begun."""
    engine = on_device("pack", 2, 3, num_pages=8)
    engine.loop.handle(submit(0, [1, 2, 3], max_tokens=24, adapter="0"))
    for _ in range(4):
        engine.step()
    engine.loop.handle(submit(1, [4, 5], max_tokens=20, adapter="1"))
    engine.step()
    engine.loop.handle(submit(2, [7], max_tokens=1, adapter="0"))
    for number in range(3, 8):
        engine.loop.handle(submit(number, [*range(number, number + 19)], adapter="0"))
    seen: list[set[int]] = []
    while engine.loop.has_work:
        engine.step()
        running = {int(r.submit.request_id) for r in engine.scheduler._rows.running}
        if seen[-1:] != [running]:
            seen.append(running)
    assert engine.scheduler.stats().total_retractions == 1
    in_order = [running for running in seen if running and running != {0}]
    assert in_order[:2] == [{0, 1}, {1}]


def figures(case: SlicesCase) -> dict[str, float]:
    run = SlicesRun(replace(case, num_steps=1500))
    run.run()
    return run.figures()


def test_l08_fewer_adapters_run_at_once_where_all_are_on_the_device() -> None:
    """L08: as many rows run, of half as many adapters; no stream pauses for it, and no request
    waits for twice as long."""
    [by_arrival, packed] = [figures(case) for case in CASES if case.name.startswith("on-device")]
    assert by_arrival["adapters_per_step"] > 7.5
    assert packed["adapters_per_step"] < 0.6 * by_arrival["adapters_per_step"]
    assert packed["mean_rows"] >= 0.995 * by_arrival["mean_rows"]
    assert packed["pauses"] == 0
    assert packed["wait_max"] < 2 * by_arrival["wait_max"]


def test_l08_packing_leaves_a_rare_adapter_its_turn_where_all_are_on_the_device() -> None:
    """L08, L06: places are free, rows are not, and answers are longer than any adapter's
    patience."""
    engine = on_device("pack", 4, 4, num_pages=2048)
    for number in range(12):
        name = str(number % 2)
        engine.loop.handle(
            submit(number, [number], max_tokens=3 * ROW_PATIENCE_STEPS, adapter=name)
        )
    engine.step()
    engine.loop.handle(submit(99, [7, 7], max_tokens=2, adapter="3"))
    for _ in range(ROW_PATIENCE_STEPS + 4):
        engine.step()
        if engine.outputs.get(99):
            return
    raise AssertionError("adapter 3 was starved")
