"""`bench adapters`: rows, waits and pauses when more adapters are wanted than may run at once.

Counts steps, rows and tokens: no model, no clock, no time in any figure, so that a run gives the
same on every machine. Each case runs as it is and with an endless quantum, which is what the batch
would give if no request were ever paused.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from manyroots.bench.manyroots_driver import make_cache
from manyroots.bench.scheduler_trace import MADE_UP_TOKEN
from manyroots.config import Policy, SchedulerSettings
from manyroots.ids import AdapterDigest, AdapterName, RequestId
from manyroots.lora.limits import SPARE_SLOTS, AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.messages import StepOutputs, Submit
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler
from manyroots.step import AdapterLoaded, LoadAdapter, Plan, StepResult

ENDLESS = 2**31
"""A quantum that is never over."""
PROMPT_LEN = 24


@dataclass(frozen=True, slots=True)
class SlicesCase:
    """Traffic that never ends, counted in steps."""

    name: str
    max_num_seqs: int
    max_loras: int
    num_adapters: int
    """Asked for all the time."""
    num_outstanding: int
    """Of those: how many wait or run at any time."""
    output_len: tuple[int, int]
    """From, to."""
    skew: float = 0.0
    """The n-th adapter is asked for in proportion to n to the minus this; 0 is all alike."""
    rare_every: int = 0
    """Steps between requests of one more adapter; 0 is none."""
    rare_output_len: int = 4
    can_load_ahead: bool = True
    """Whether there are spare slots, as in the engine."""
    load_steps: int = 1
    """Results between a load's intent and its answer."""
    policy: str = Policy.FCFS.value
    num_steps: int = 10_000
    seed: int = 0


CASES = (
    SlicesCase("rare-adapter", 64, 4, 4, 96, (200, 800), rare_every=1000),
    SlicesCase("rare-and-long", 64, 4, 4, 96, (200, 800), rare_every=1000, rare_output_len=400),
    SlicesCase("rare-not-ahead", 64, 4, 4, 96, (200, 800), rare_every=1000, can_load_ahead=False),
    SlicesCase(
        "rare-long-not-ahead",
        64,
        4,
        4,
        96,
        (200, 800),
        rare_every=1000,
        rare_output_len=400,
        can_load_ahead=False,
    ),
    SlicesCase("many-adapters", 32, 4, 50, 200, (8, 40), skew=1.0),
    SlicesCase("on-device", 32, 8, 8, 96, (50, 150)),
    SlicesCase("on-device-packed", 32, 8, 8, 96, (50, 150), policy=Policy.PACK.value),
)


class SlicesRun:
    """A scheduler under a case's traffic, one step planned ahead."""

    def __init__(self, case: SlicesCase, quantum_steps: int | None = None) -> None:
        """`quantum_steps`: None is as in the engine."""
        self._case = case
        self._rng = random.Random(case.seed)
        self._weights = [(n + 1) ** -case.skew for n in range(case.num_adapters)]
        settings = SchedulerSettings(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=2048,
            scheduling_policy=case.policy,
            adapter_quantum_steps=quantum_steps,
        )
        longest = PROMPT_LEN + max(case.output_len[1], case.rare_output_len) + 16
        cache = make_cache(2 * (case.num_outstanding + 8) * (longest // 16 + 1), 16)
        spare = case.max_loras // SPARE_SLOTS if case.can_load_ahead else 0
        limits = AdapterLimits(max_loras=case.max_loras, max_cpu_loras=0, num_spare_slots=spare)
        self._adapters = Residency(limits)
        self.scheduler = Scheduler(settings, cache, self._adapters, max_model_len=longest)
        for number in range(case.num_adapters + 1):
            spec = AdapterSpec(AdapterDigest(number.to_bytes(4, "big")), rank=8, num_bytes=1)
            self.scheduler.load_adapter(AdapterName(f"a{number}"), spec, path="")
        self._plans: deque[Plan] = deque()
        self._loads: deque[tuple[int, LoadAdapter]] = deque()
        self._step = 0
        self._came: dict[RequestId, tuple[int, int]] = {}
        """Of those that wait: when they came and for which adapter."""
        self.waits: list[list[int]] = [[] for _ in range(case.num_adapters + 1)]
        """Steps from submission to the first token, by adapter."""
        self.gaps: list[int] = []
        """Steps between two tokens of a request, where they are more than one."""
        self._last_token: dict[RequestId, int] = {}
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.adapters: list[int] = []
        """How many run."""
        self._next_id = 0
        self._outstanding: set[RequestId] = set()

    def submit(self, adapter: int, output_len: int) -> RequestId:
        request_id = RequestId(self._next_id)
        self._next_id += 1
        prompt = [request_id + 1, *range(PROMPT_LEN - 1)]
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        self.scheduler.submit(
            Submit(request_id, prompt, None, sampling, 0, (), AdapterName(f"a{adapter}"))
        )
        self._came[request_id] = (self._step, adapter)
        return request_id

    def run(self) -> None:
        case, rng = self._case, self._rng
        while self._step < case.num_steps:
            while len(self._outstanding) < case.num_outstanding:
                [adapter] = rng.choices(range(case.num_adapters), self._weights)
                self._outstanding.add(self.submit(adapter, rng.randint(*case.output_len)))
            if case.rare_every and self._step % case.rare_every == case.rare_every // 2:
                self.submit(case.num_adapters, case.rare_output_len)
            self.step()

    def step(self) -> None:
        self._step += 1
        plan = self.scheduler.schedule()
        if plan is not None:
            self.rows.append(len(plan.rows))
            self.tokens.append(plan.total_tokens)
            self.adapters.append(self._adapters.slots.num_seated)
            self._loads += [
                (self._step + self._case.load_steps, intent)
                for intent in plan.adapters if isinstance(intent, LoadAdapter)
            ]  # fmt: skip
            self._plans.append(plan)
        if len(self._plans) > 1 or (plan is None and self._plans):
            self._note(self.scheduler.advance(self._answer(self._plans.popleft())))

    def _answer(self, plan: Plan) -> StepResult:
        num_samples = int(np.count_nonzero(plan.samples))
        tokens = np.full(num_samples, MADE_UP_TOKEN, np.int32)
        return StepResult(plan.step_id, tokens, adapters=tuple(self._ended_loads()))

    def _ended_loads(self) -> Iterator[AdapterLoaded]:
        while self._loads and self._loads[0][0] <= self._step:
            yield AdapterLoaded(self._loads.popleft()[1].load_id, None)

    def _note(self, outputs: StepOutputs) -> None:
        for output in outputs:
            request_id = output.request_id
            if request_id in self._came:
                came, adapter = self._came.pop(request_id)
                self.waits[adapter].append(self._step - came)
            elif self._step - self._last_token[request_id] > 1:
                self.gaps.append(self._step - self._last_token[request_id])
            self._last_token[request_id] = self._step
            if output.finish_reason is not None:
                del self._last_token[request_id]
                self._outstanding.discard(request_id)

    def figures(self) -> dict[str, Any]:
        warm = len(self.rows) // 10
        rare = self.waits[-1]
        still = [self._step - came for came, _ in self._came.values()]
        often = sorted(wait for waits in self.waits[:-1] for wait in waits)
        stats = self.scheduler.stats()
        loads = self._adapters.stats()
        return {
            "mean_rows": sum(self.rows[warm:]) / len(self.rows[warm:]),
            "fewest_rows": min(self.rows[warm:]),
            "tokens_per_step": sum(self.tokens[warm:]) / len(self.tokens[warm:]),
            "adapters_per_step": sum(self.adapters[warm:]) / len(self.adapters[warm:]),
            "rare_requests": len(rare),
            "rare_wait_max": max(rare, default=0),
            "wait_p99": often[len(often) * 99 // 100],
            "wait_max": often[-1],
            "still_waiting_max": max(still, default=0),
            "pause_max": max(self.gaps, default=0),
            "pauses": len(self.gaps),
            "adapter_loads": loads.total_loads_from_host + loads.total_loads_from_storage,
            "retractions": stats.total_retractions,
        }


SHOWN = {
    "mean_rows": "rows a step, mean",
    "fewest_rows": "rows a step, fewest",
    "tokens_per_step": "tokens a step, mean",
    "adapters_per_step": "adapters a step, mean",
    "rare_requests": "requests of the rare adapter",
    "rare_wait_max": "its longest wait, steps",
    "wait_p99": "waits of the others, p99, steps",
    "wait_max": "waits of the others, longest",
    "still_waiting_max": "waits that are not over, longest",
    "pause_max": "pause of a request, longest, steps",
    "pauses": "pauses, number",
    "adapter_loads": "adapters loaded, number",
    "retractions": "retractions, number",
}
"""Figures as the table calls them."""


def run_slices(cases: list[str], num_steps: int) -> dict[str, Any]:
    """Each case as it is and with an endless quantum; prints a table and gives the report."""
    runs = []
    for case in CASES:
        if case.name not in cases:
            continue
        case = replace(case, num_steps=num_steps)
        figures = {}
        for name, quantum_steps in (("time slices", None), ("endless quantum", ENDLESS)):
            run = SlicesRun(case, quantum_steps)
            run.run()
            figures[name] = run.figures()
        runs.append({"case": asdict(case), "figures": figures})
        print(f"{case.name:<34}" + "".join(f"{name:>20}" for name in figures))
        for name, label in SHOWN.items():
            cells = "".join(f"{each[name]:>20.2f}" for each in figures.values())
            print(f"  {label:<32}{cells}")
    return {"runs": runs}
