"""The cases of `bench scheduler`: a trace, a burst, decoding in steady state, a long queue.

In: a workload and a way to build a scheduler. Out: figures as plain data. Knows neither whose
scheduler it drives nor how.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manyroots.bench.scheduler_trace import (
    DrivenScheduler,
    SchedulerLimits,
    SchedulerWorkload,
    StepTimes,
    clock,
)
from manyroots.process.gc_tuning import kept_meanwhile

Make = Callable[[SchedulerLimits], DrivenScheduler]

MAX_IDLE_STEPS = 50
STEADY_OUTPUT_LEN = 4096
"""Longer than any steady state is watched, so that no request ends."""
PATIENCE_S = 3.0
"""A steady state that costs more than this is cut short; three steps are always taken."""


def measure_all(workload: SchedulerWorkload, page_size: int, make: Make) -> dict[str, Any]:
    """Every case once, at one page size."""
    return {
        "page_size": page_size,
        "trace": measure_trace(workload, page_size, make),
        "burst": measure_burst(workload, page_size, make),
        "decode": [
            measure_steady(workload, page_size, make, batch, ())[0]
            for batch in workload.decode_batches
        ],
        "waiting": measure_steady(workload, page_size, make, workload.batch, workload.waiting),
    }


def measure_trace(workload: SchedulerWorkload, page_size: int, make: Make) -> dict[str, Any]:
    """All requests at once, run to the end."""
    count, groups = workload.num_requests, min(workload.groups, workload.num_requests)
    prompts = workload.prompts(count, groups, page_size)
    scheduler = make(_limits(workload, page_size, count, workload.output_len))
    with kept_meanwhile():
        submit_s = scheduler.submit(prompts, workload.output_len)
        steps = _run(scheduler)
    plan_s = sum(step.plan_s for step in steps)
    advance_s = sum(step.advance_s for step in steps)
    prefill = [step for step in steps if step.has_prefill]
    decode = [step for step in steps if not step.has_prefill]
    return {
        "hit_rate": _hit_rate(steps, count * workload.prompt_len),
        "best_hit_rate": workload.best_hit_rate(count, groups, page_size),
        "num_steps": len(steps),
        "submit_us_per_request": submit_s * 1e6 / count,
        "plan_us_per_request": plan_s * 1e6 / count,
        "advance_us_per_request": advance_s * 1e6 / count,
        "plan_and_advance_us_per_request": (plan_s + advance_s) * 1e6 / count,
        "prefill_step": _medians(prefill),
        "decode_step": _medians(decode),
    }


def measure_burst(workload: SchedulerWorkload, page_size: int, make: Make) -> dict[str, Any]:
    """Requests with one head in common, submitted together: once with the workload's budget, and
    once with a budget that lets all of them begin in one step."""
    count = workload.burst
    prompts = workload.prompts(count, 1, page_size)
    figures: dict[str, Any] = {"best_hit_rate": workload.best_hit_rate(count, 1, page_size)}
    for name, budget in (
        ("as_budgeted", workload.budget),
        ("one_step", count * workload.prompt_len),
    ):
        roomy = replace(workload, budget=budget, batch=max(workload.batch, count))
        scheduler = make(_limits(roomy, page_size, count, workload.output_len))
        scheduler.submit(prompts, workload.output_len)
        steps = _run(scheduler)
        figures[name] = {
            "budget": budget,
            "hit_rate": _hit_rate(steps, count * workload.prompt_len),
            "num_steps_with_arrivals": sum(step.num_arrivals > 0 for step in steps),
        }
    return figures


def measure_steady(
    workload: SchedulerWorkload,
    page_size: int,
    make: Make,
    batch: int,
    waiting: tuple[int, ...],
) -> list[dict[str, Any]]:
    """A full batch that only decodes: as it is, or with each of these numbers waiting."""
    prompts = workload.prompts(batch, min(workload.groups, batch), page_size)
    wide = replace(workload, batch=batch, budget=max(workload.budget, batch))
    scheduler = make(_limits(wide, page_size, batch + 1, STEADY_OUTPUT_LEN))
    scheduler.submit(prompts, STEADY_OUTPUT_LEN)
    _fill(scheduler, batch)
    figures = []
    num_waiting = 0
    for target in waiting or (0,):
        more = [prompts[i % batch] for i in range(target - num_waiting)]
        if more:
            scheduler.submit(more, STEADY_OUTPUT_LEN)
        num_waiting = target
        with kept_meanwhile():
            steps = _watch(scheduler, workload.steady_steps)
        figures.append({"batch": steps[-1].num_rows, "waiting": num_waiting, **_medians(steps)})
    return figures


def _limits(
    workload: SchedulerWorkload, page_size: int, count: int, output_len: int
) -> SchedulerLimits:
    """Room for `count` whole requests, so that no case depends on eviction or retraction."""
    longest = workload.prompt_len + output_len
    return SchedulerLimits(
        page_size=page_size,
        num_pages=count * (-(-longest // page_size) + 1) + 2,
        max_model_len=longest + page_size,
        budget=workload.budget,
        batch=workload.batch,
    )


def _run(scheduler: DrivenScheduler) -> list[StepTimes]:
    steps: list[StepTimes] = []
    num_idle = 0
    while scheduler.has_work:
        step = scheduler.step()
        steps.append(step)
        num_idle = 0 if step.num_rows else num_idle + 1
        if num_idle > MAX_IDLE_STEPS:
            raise RuntimeError(f"no request computed anything in {num_idle} steps")
    return steps


def _fill(scheduler: DrivenScheduler, batch: int) -> None:
    """Step until the whole batch decodes."""
    num_idle = 0
    while True:
        step = scheduler.step()
        if step.num_rows == batch and not step.has_prefill:
            return
        num_idle = 0 if step.num_rows else num_idle + 1
        if num_idle > MAX_IDLE_STEPS:
            raise RuntimeError(f"{batch} requests never decoded together")


def _watch(scheduler: DrivenScheduler, count: int) -> list[StepTimes]:
    steps: list[StepTimes] = []
    begin = clock()
    while len(steps) < count and (len(steps) < 3 or clock() - begin < PATIENCE_S):
        steps.append(scheduler.step())
    return steps


def _hit_rate(steps: list[StepTimes], num_prompt_tokens: int) -> float:
    return sum(step.num_hit_tokens for step in steps) / num_prompt_tokens


def _medians(steps: list[StepTimes]) -> dict[str, Any]:
    if not steps:
        return {"num_steps": 0}
    return {
        "num_steps": len(steps),
        "median_rows": statistics.median(step.num_rows for step in steps),
        "plan_ms": statistics.median(step.plan_s for step in steps) * 1e3,
        "advance_ms": statistics.median(step.advance_s for step in steps) * 1e3,
        "plan_and_advance_ms": statistics.median(step.plan_s + step.advance_s for step in steps)
        * 1e3,
    }
