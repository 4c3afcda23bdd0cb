"""The pack policy (L08): adapters are loaded less often than by order of arrival."""

from __future__ import annotations

import random

import pytest

from manyroots.ids import AdapterDigest, AdapterName
from manyroots.lora.spec import AdapterSpec
from manyroots.scheduler.swap_costs import PACK_PATIENCE
from manyroots.scheduler.turns import AGING_STEPS
from tests.deciding import Deciding, submit

NUM_REQUESTS = 240


def make(policy: str, *, num_adapters: int, cap: int, rows: int) -> Deciding:
    engine = Deciding(
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


def num_steps(engine: Deciding) -> int:
    return engine.scheduler.stats().total_steps


def test_l08_packing_starves_nobody() -> None:
    """L08, L06: adapters 0 and 1 always have requests that wait; that of adapter 2 begins when its
    patience is over."""
    rng = random.Random(1)
    engine = make("pack", num_adapters=3, cap=2, rows=8)
    number = 0
    first_step = None
    while first_step is None or num_steps(engine) - first_step < PACK_PATIENCE * AGING_STEPS + 20:
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
