"""What it costs the others that no adapter starves (L06), through the whole engine: real weights,
read from their folders into slots, and real tokens. Steps are counted, never seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest

from manyroots.messages import FinishReason
from manyroots.step import AdapterLoaded, LoadAdapter, Plan, Runner, StepResult
from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.helpers.patience import PATIENCE_S
from tests.helpers.real_engine import RealEngine, RealWorld
from tests.soaks.differential import ATTENTION
from tests.unit.models.tiny import load_tiny

NAMES = ("a", "b", "c", "d", "rare")
ROWS = 8
LOAD_STEPS = 3
"""Results from a load's plan to its answer."""
ENDLESS = 2**31


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWorld]:
    world = RealWorld(tmp_path_factory.mktemp("world"), "full", num_hidden_layers=1)
    targets = load_tiny(world.model).adapter_targets()
    for seed, name in enumerate(NAMES, start=10):
        write_adapter(world.folder / name, targets, Recipe(rank=4, modules=ATTENTION, seed=seed))
    yield world
    world.close()


class Steady:
    """The engine's runner, with loads that are answered after as many steps on any machine."""

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine
        self._runner: Runner = engine.loop._runner
        self._due: deque[tuple[int, LoadAdapter]] = deque()
        self._ended: dict[int, AdapterLoaded] = {}
        self._num_launched = 0
        self.rows: list[int] = []

    def launch(self, plan: Plan) -> Future[StepResult]:
        self._num_launched += 1
        self.rows.append(len(plan.rows))
        loads = [intent for intent in plan.adapters if isinstance(intent, LoadAdapter)]
        self._due += [(self._num_launched + LOAD_STEPS, load) for load in loads]
        result = self._runner.launch(plan).result(PATIENCE_S)
        self._ended |= {loaded.load_id: loaded for loaded in result.adapters}
        if loads:
            self._engine.finish_loads()  # the next result has all that this plan began
        answers = []
        while self._due and self._due[0][0] <= self._num_launched:
            answers.append(self._ended.pop(self._due.popleft()[1].load_id))
        done: Future[StepResult] = Future()
        done.set_result(replace(result, adapters=tuple(answers)))
        return done

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class Traffic:
    """The adapters that are asked, step by step; the same whatever the engine does."""

    name: str
    max_loras: int
    adapters: str
    """Those that are asked for all the time, in turn."""
    in_a_row: int
    """So many requests of each."""
    output_len: tuple[int, int]
    rare_every: int
    num_steps: int = 600

    def asked(self) -> Iterator[tuple[int, str, int]]:
        """Step, adapter and length of its answer. As much as all rows can serve, and twice their
        number beside, so that some request always waits."""
        rng = random.Random(self.name)
        number = num_tokens = 0
        for step in range(self.num_steps):
            while num_tokens <= ROWS * (step + 2 * self.output_len[1]):
                name = self.adapters[number // self.in_a_row % len(self.adapters)]
                length = rng.randint(*self.output_len)
                yield step, name, length
                number += 1
                num_tokens += length
            if step % self.rare_every == self.rare_every // 2:
                yield step, "rare", 4


class Run:
    """An engine under such traffic."""

    def __init__(self, world: RealWorld, traffic: Traffic, **settings: int) -> None:
        engine = RealEngine(
            world, names=NAMES, audits=False, max_loras=traffic.max_loras, max_num_seqs=ROWS,
            num_gpu_blocks_override=2000, **settings,
        )  # fmt: skip
        self.steady = engine.loop._runner = Steady(engine)
        asked = deque(traffic.asked())
        self.rare: list[int] = []
        """Steps from its submission to its first token; of those that have one."""
        rare: dict[int, int] = {}
        for step in range(traffic.num_steps):
            while asked and asked[0][0] <= step:
                _, name, length = asked.popleft()
                number = engine.submit([3 + len(asked) % 280, 4, 5], name, max_tokens=length)
                if name == "rare":
                    rare[number] = engine.num_steps
            engine.step()
        engine.audit()
        said = engine.said
        self.rare = [
            first - at for n, at in rare.items() if (first := said[n].first_step) is not None
        ]
        self.num_rare = len(rare)
        self.num_pauses = engine.scheduler.stats().total_pauses
        self.mean_rows = sum(self.steady.rows) / traffic.num_steps
        self.answers = {
            number: told.tokens
            for number, told in said.items() if told.reason is FinishReason.LENGTH
        }  # fmt: skip
        engine.close()


@pytest.mark.parametrize(
    ("traffic", "bound"),
    [
        (Traffic("full cap, no slot to spare", 2, "ab", 1, (30, 150), 150, 460), 300),
        (Traffic("waves, places for all", 4, "ab", 8, (10, 60), 80, 400), 16),
    ],
    ids=lambda given: given.name if isinstance(given, Traffic) else "",
)
def test_l06_no_adapter_starves_and_others_pay_next_to_nothing(
    world: RealWorld, traffic: Traffic, bound: int
) -> None:
    """L06: by default, rows that run are at least 0.97 of those that run where nothing is paused,
    with the same requests in the same steps. The rare adapter is served; answers are the same."""
    sliced, endless = Run(world, traffic), Run(world, traffic, adapter_quantum_steps=ENDLESS)
    assert sliced.num_pauses > 0
    assert endless.num_pauses == 0
    assert sliced.mean_rows >= 0.97 * endless.mean_rows
    assert len(sliced.rare) >= sliced.num_rare - 1, "those of the last steps may wait"
    assert max(sliced.rare) <= bound
    assert len(endless.rare) < len(sliced.rare), "they would be served as well without sliced"
    both = sliced.answers.keys() & endless.answers.keys()
    assert len(both) > 0.8 * len(endless.answers)
    assert {n: sliced.answers[n] for n in both} == {n: endless.answers[n] for n in both}
