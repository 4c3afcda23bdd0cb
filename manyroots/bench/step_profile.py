"""Where the time of a run of whole requests goes: by kinds of steps, and by kernels of some steps.

Takes the place of an engine's runner and passes every plan on. A step's time is from the end of the
one before it (or from its own launch, where nothing was under way) to the moment when its tokens
were on the host, so that the times of all steps and what is between them add up to the run's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from manyroots.bench.kernel_profile import KernelTimes, kernel_intervals, share
from manyroots.step import Plan, Runner, StepResult

PROFILED_STEPS = 30
PRINTED_KERNELS = 20
ROW_BOUNDS = (1, 8, 32, 64, 128, 192, 256)
TOKEN_BOUNDS = (128, 256, 512, 768, 1024, 1536, 2048, 4096, 6144, 8191)


@dataclass(slots=True)
class WatchedStep:
    """One plan with rows."""

    num_tokens: int
    num_decodes: int
    """Rows of one token."""
    launched_s: float
    num_guesses: int = 0
    ended_s: float = 0.0

    @property
    def kind(self) -> tuple[str, int]:
        """Decoding alone or with prompts, and the largest number of its class; 0 is no bound."""
        if self.num_tokens == self.num_decodes:
            return "decode", _bound(ROW_BOUNDS, self.num_tokens)
        return "mixed", _bound(TOKEN_BOUNDS, self.num_tokens)


def _bound(bounds: Sequence[int], value: int) -> int:
    return next((bound for bound in bounds if value <= bound), 0)


class WatchedRunner:
    """A runner that notes when each step was launched and when it ended."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self.steps: list[WatchedStep] = []
        self.kernels: KernelTimes | None = None
        self._profiled: range = range(0)
        self._profile: torch.profiler.profile | None = None

    def watch(self, profiled: range) -> None:
        """Begin a new run; of the steps `profiled`, kernels are noted as well."""
        self.steps, self.kernels = [], None
        self._profiled = profiled

    def launch(self, plan: Plan) -> Future[StepResult]:
        if len(plan.rows) == 0:
            return self._inner.launch(plan)
        self._switch_profile(len(self.steps))
        num_decodes = int((plan.num_tokens == 1).sum())
        num_guesses = sum(len(draft.tokens) for draft in plan.drafts)
        step = WatchedStep(plan.total_tokens, num_decodes, time.perf_counter(), num_guesses)
        self.steps.append(step)
        future = self._inner.launch(plan)
        future.add_done_callback(lambda _: _end(step))
        return future

    def close(self) -> None:
        self._inner.close()

    def _switch_profile(self, number: int) -> None:
        if self._profiled and number == self._profiled.start:
            torch.cuda.synchronize()
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self._profile.start()
        elif self._profile is not None and number == self._profiled.stop:
            torch.cuda.synchronize()
            self._profile.stop()
            self.kernels = share(kernel_intervals(self._profile))
            self._profile = None


def _end(step: WatchedStep) -> None:
    step.ended_s = time.perf_counter()


def steps_by_kind(steps: Sequence[WatchedStep]) -> list[dict[str, Any]]:
    """A row for each kind of step, the times in milliseconds; `waiting_ms` is what passed between
    the end of one step and the launch of the next."""
    times: dict[tuple[str, int], list[tuple[float, float, WatchedStep]]] = defaultdict(list)
    until = steps[0].launched_s if steps else 0.0
    for step in steps:
        begin = max(until, step.launched_s)
        times[step.kind].append((step.ended_s - begin, begin - until, step))
        until = step.ended_s
    return [
        {
            "kind": kind,
            "at_most": bound or None,
            "steps": len(own),
            "total_tokens": sum(step.num_tokens for _, _, step in own),
            "tokens": round(sum(step.num_tokens for _, _, step in own) / len(own)),
            "decodes": round(sum(step.num_decodes for _, _, step in own) / len(own)),
            "ms": round(1e3 * sum(took for took, _, _ in own) / len(own), 2),
            "total_ms": round(1e3 * sum(took for took, _, _ in own), 1),
            "waiting_ms": round(1e3 * sum(waited for _, waited, _ in own), 1),
        }
        for (kind, bound), own in sorted(
            times.items(), key=lambda item: (item[0][0], item[0][1] or float("inf"))
        )
    ]


def steps_by_guesses(steps: Sequence[WatchedStep], num_rows: int) -> list[dict[str, Any]]:
    """A row for each number of guesses that steps check in which this many rows decode. Medians in
    milliseconds: `ms` is from the launch, or the end of the step before, to the answer, and
    `waiting_ms` what passed between the end of the step before and the launch."""
    times: dict[int, list[tuple[float, float]]] = defaultdict(list)
    until = steps[0].launched_s if steps else 0.0
    for step in steps:
        begin = max(until, step.launched_s)
        if step.num_tokens - step.num_guesses == num_rows:
            times[step.num_guesses].append((step.ended_s - begin, begin - until))
        until = step.ended_s
    return [
        {
            "guesses": count,
            "steps": len(own),
            "ms": round(1e3 * statistics.median(took for took, _ in own), 3),
            "waiting_ms": round(1e3 * statistics.median(waited for _, waited in own), 3),
        }
        for count, own in sorted(times.items())
    ]


def show(name: str, kinds: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> None:
    print(f"{name}: steps by kind", file=sys.stderr)
    for row in kinds:
        bound = f"<= {row['at_most']}" if row["at_most"] else "more"
        print(
            f"{row['kind']:>8} {bound:>8} {row['steps']:5d} steps of {row['tokens']:5d} tokens,"
            f" {row['decodes']:4d} of them decoding  {row['ms']:8.2f} ms each"
            f"  {row['total_ms']:9.1f} ms in all, {row['waiting_ms']:.1f} waiting before",
            file=sys.stderr,
        )
    if kernels:
        print(f"{name}: one of {PROFILED_STEPS} steps from its middle", file=sys.stderr)
    for row in kernels[:PRINTED_KERNELS]:
        print(
            f"{row['us']:12.1f} us {row['launches']:8.2f} x  {row['kernel'][:100]}",
            file=sys.stderr,
        )
    sys.stderr.flush()
