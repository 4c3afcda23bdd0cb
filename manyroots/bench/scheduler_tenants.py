"""What many tenants cost: one step that begins a batch out of a long queue, by how many salts wait.

In: how many tenants, and how many requests begin and wait. Out: thread CPU time of the step that
begins them, for each policy, and its ratio to one tenant's. Ours alone: no peer has tenants.
"""

from __future__ import annotations

import gc
import statistics
from array import array
from typing import Any

from manyroots.bench.manyroots_driver import make_cache
from manyroots.bench.scheduler_trace import clock
from manyroots.config import SchedulerSettings
from manyroots.ids import RequestId
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.residency import Residency
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from manyroots.scheduler.scheduler import Scheduler

POLICIES = ("fcfs", "priority", "pack", "fair")
PAGE_SIZE = 16
NUM_BEGINNING = 256
NUM_ROUNDS = 5
"""The median counts; the tenants take turns within a round."""


def measure_tenants(tenants: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each policy and number of tenants, as many requests waiting as the most tenants."""
    num_waiting = max(*tenants, 5 * NUM_BEGINNING)
    figures = []
    for policy in POLICIES:
        found: dict[int, list[float]] = {count: [] for count in tenants}
        for _ in range(NUM_ROUNDS):
            for count in tenants:
                found[count].append(_plan_ms(policy, count, num_waiting))
        plan_ms = {count: statistics.median(times) for count, times in found.items()}
        figures += [
            {
                "policy": policy,
                "tenants": count,
                "waiting": num_waiting,
                "plan_ms": plan_ms[count],
                "least_ms": min(found[count]),
                "most_ms": max(found[count]),
                "ratio": plan_ms[count] / plan_ms[tenants[0]],
            }
            for count in tenants
        ]
    return figures


def tenant_lines(figures: list[dict[str, Any]]) -> list[str]:
    """A table of them."""
    lines = [f"{NUM_BEGINNING} begin in one step, by tenants that wait (requests: all the same)"]
    lines += [
        f"  {each['policy']:<10}{each['tenants']:>8} of {each['waiting']} waiting: "
        f"{each['plan_ms']:.2f} ms ({each['least_ms']:.2f} to {each['most_ms']:.2f}), "
        f"{each['ratio']:.2f} times one tenant's"
        for each in figures
    ]
    return lines


def _plan_ms(policy: str, num_tenants: int, num_waiting: int) -> float:
    settings = SchedulerSettings(
        max_num_seqs=NUM_BEGINNING, max_num_batched_tokens=8192, scheduling_policy=policy
    )
    cache = make_cache(3 * num_waiting, PAGE_SIZE)
    adapters = Residency(AdapterLimits(max_loras=0, max_cpu_loras=0))
    scheduler = Scheduler(settings, cache, adapters, max_model_len=8 * PAGE_SIZE)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    for number in range(num_waiting):
        salt = f"tenant {number % num_tenants}"
        prompt = array("i", [number % 1000] * PAGE_SIZE)
        submit = Submit(
            RequestId(number), prompt, salt, sampling, number, stop_ids=(), adapter=None
        )
        scheduler.submit(submit)
    gc.collect()
    gc.disable()
    begin = clock()
    plan = scheduler.schedule()
    seconds = clock() - begin
    gc.enable()
    if plan is None or len(plan.arrivals) != NUM_BEGINNING:
        raise RuntimeError(f"a step began {plan and len(plan.arrivals)} of {NUM_BEGINNING}")
    return seconds * 1e3
