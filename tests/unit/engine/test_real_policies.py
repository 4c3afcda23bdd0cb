"""The order of requests, through the whole engine: real weights, slots and pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manyroots.messages import FinishReason
from manyroots.scheduler.slices import QUANTUM_LOADS_ALONE
from manyroots.step import LoadAdapter
from tests.helpers.real_engine import MAX_LEN, PAGE, RealEngine, RealWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    world = RealWorld(tmp_path_factory.mktemp("world"), "full", num_hidden_layers=1)
    yield world
    world.close()


def test_l03_an_adapter_blocked_on_memory_leaves_the_cap_to_another_in_the_same_step(
    world: RealWorld,
) -> None:
    """L03: cap 1. A's request, which came first, has no room; B's runs in the very next step."""
    engine = RealEngine(world, max_loras=1, num_gpu_blocks_override=MAX_LEN // PAGE)
    engine.ask([5, 6, 7], "b")  # its weights are on the device
    wanted = engine.ask([8, 9], "b", salt="alone").tokens
    busy = engine.submit(list(range(3, 103)), max_tokens=50)
    while not engine.said[busy].tokens:
        engine.step()
    blocked = engine.submit(list(range(103, 223)), "a")
    runs = engine.submit([8, 9], "b")
    engine.plans.clear()
    engine.step()
    [plan] = engine.plans
    assert [int(arrival.request_id) for arrival in plan.arrivals] == [runs]
    assert [arrival.adapter_slot is None for arrival in plan.arrivals] == [False]
    assert len(plan.rows) == 2, "it runs beside the one that has the room"
    while engine.said[runs].reason is None:
        engine.step()
    assert engine.said[runs].tokens == wanted
    assert engine.said[busy].reason is None
    assert not engine.said[blocked].tokens
    engine.run()
    assert engine.said[blocked].reason is FinishReason.LENGTH
    engine.close()


Asked = tuple[str | None, str | None]


def order(
    world: RealWorld, policy: str, asked: list[Asked], *, max_loras: int = 2
) -> tuple[list[int], int]:
    """In which order requests of (adapter, salt) begin, one row at a time, and how often weights
    are brought to the device for them. Each must give what it gives alone."""
    # Few pages: the audit after each step looks at all of them, and memory has room for a million.
    engine = RealEngine(
        world,
        scheduling_policy=policy,
        max_num_seqs=1,
        max_loras=max_loras,
        num_gpu_blocks_override=4 * MAX_LEN // PAGE,
    )
    prompts = [[20 + number, 9, 8, 7, 6] for number in range(len(asked))]
    alone = [
        engine.ask(prompt, name, salt="alone", max_tokens=3).tokens
        for prompt, (name, _) in reversed(list(zip(prompts, asked, strict=True)))
    ]
    engine.plans.clear()
    numbers = [
        engine.submit(prompt, name, salt=salt, max_tokens=3)
        for prompt, (name, salt) in zip(prompts, asked, strict=True)
    ]
    while engine.loop.has_work:
        engine.step()
        engine.finish_loads()
    assert [engine.said[number].tokens for number in numbers] == alone[::-1]
    begun = [int(arrival.request_id) for plan in engine.plans for arrival in plan.arrivals]
    num_loads = sum(isinstance(i, LoadAdapter) for plan in engine.plans for i in plan.adapters)
    engine.close()
    return [number - numbers[0] for number in begun], num_loads


def test_l08_each_policy_has_its_own_order(world: RealWorld) -> None:
    """L08: with a place for one adapter the requests of each are taken together, in the order of
    their arrival, and `pack` takes those first of which there are most; with all of them on the
    device it groups them, that of the oldest first; `fair` takes turns between tenants, however
    many requests one has sent; else the first is first."""
    packed: list[Asked] = [(name, None) for name in "cababb"]
    assert order(world, "fcfs", packed, max_loras=3) == ([0, 1, 2, 3, 4, 5], 0)
    assert order(world, "fcfs", packed, max_loras=1) == ([0, 1, 3, 2, 4, 5], 2)
    assert order(world, "pack", packed, max_loras=3) == ([0, 1, 3, 2, 4, 5], 0)
    assert order(world, "pack", packed, max_loras=1) == ([0, 2, 4, 5, 1, 3], 2)
    unequal: list[Asked] = [("a", "many")] * 8 + [("a", "few")] * 2 + [(None, None)]
    assert order(world, "fcfs", unequal)[0] == list(range(11))
    fair, _ = order(world, "fair", unequal)
    assert max(fair.index(number) for number in (8, 9, 10)) <= 6
    for tenant in (range(8), (8, 9)):
        assert [number for number in fair if number in tenant] == list(tenant)


class Hot:
    """An engine whose places are taken by adapters that are asked for without end."""

    def __init__(self, world: RealWorld, max_tokens: int, **settings: Any) -> None:
        self.engine = RealEngine(
            world,
            max_loras=2,
            max_num_seqs=8,
            num_gpu_blocks_override=500,
            audits=False,
            **settings,
        )
        self.max_tokens = max_tokens
        self._next = 0
        self._live: set[int] = set()

    def step(self) -> None:
        engine = self.engine
        self._live = {number for number in self._live if engine.said[number].reason is None}
        while len(self._live) < 16:
            self._next += 1
            prompt = [3 + self._next % 200, 3 + self._next // 200]
            name = "ab"[self._next % 2]
            self._live.add(engine.submit(prompt, name, max_tokens=self.max_tokens))
        engine.step()
        engine.finish_loads()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def steps_of_rare(self) -> int:
        """From its submission to its first token."""
        before = self.engine.num_steps
        number = self.engine.submit([250, 251], "c", max_tokens=4)
        while (first := self.engine.said[number].first_step) is None:
            assert self.engine.num_steps - before < 1000, "it starves"
            self.step()
        return first - before


MOST_STEPS = 100
"""Until a rare adapter's first token where nothing can be loaded ahead."""


def test_l06_a_rare_adapter_has_its_turn_whatever_others_ask_for(world: RealWorld) -> None:
    """L06: by default, under a full cap and endless traffic of two others; the bound is the same
    for answers of 30 and of 150 tokens. It waits for one quantum, which is so many loads where
    nothing can be loaded ahead, and for its own load."""
    for max_tokens in (30, 150):
        hot = Hot(world, max_tokens)
        hot.run(40)
        steps = [hot.steps_of_rare() for _ in range(3)]
        hot.engine.audit()
        bound = (QUANTUM_LOADS_ALONE + 4) * (1 + hot.engine.scheduler.adapters.longest_load_steps)
        hot.engine.close()
        assert max(steps) <= bound, f"{steps} with answers of {max_tokens}"
        assert max(steps[1:]) <= MOST_STEPS, f"{steps} with answers of {max_tokens}"
