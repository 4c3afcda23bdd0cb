"""Measures the time of the model, which is compared with the time of loading pages.

Wraps the function that launches a step, and fills in `seconds` of its result. A GPU's time comes
from events around the step, which its answer waits for; a CPU's from the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from manyroots.runner.inputs import StepInputs
from manyroots.step import Plan, StepResult

TakeResult = Callable[[], StepResult]
"""Waits for a launched step and gives its result."""
Compute = Callable[[Plan, StepInputs], TakeResult]
"""Launches a step."""


class StepTimer:
    """Times steps on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"

    def timed(self, compute: Compute) -> Compute:
        return self._by_events(compute) if self._is_gpu else _by_clock(compute)

    def _by_events(self, compute: Compute) -> Compute:
        def launch(plan: Plan, inputs: StepInputs) -> TakeResult:
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            answer = compute(plan, inputs)
            end.record()

            def timed() -> StepResult:
                result = answer()
                end.synchronize()
                milliseconds = begin.elapsed_time(end)
                return replace(result, seconds=float(milliseconds) / 1000.0)

            return timed

        return launch


def _by_clock(compute: Compute) -> Compute:
    def launch(plan: Plan, inputs: StepInputs) -> TakeResult:
        begin = time.perf_counter()
        answer = compute(plan, inputs)
        seconds = time.perf_counter() - begin
        return lambda: replace(answer(), seconds=seconds)

    return launch
