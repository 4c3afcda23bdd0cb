"""Where a step's time goes on the GPU, kernel by kernel.

Takes something to run; gives for each kernel how often it ran and how much of the time was its own.
Kernels that start before their inputs are there overlap: an instant belongs to the kernel that
began first of those running, since the others wait for it. Own times and idle add up to the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class KernelTimes:
    """Of one run; microseconds."""

    counts: Counter[str] = field(default_factory=Counter)
    own_us: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_us: float = 0.0

    def per_step(self, longer: KernelTimes, num_steps: int) -> list[dict[str, Any]]:
        """What one of the `num_steps` steps that `longer` had beyond this run took, by kernel,
        most time first; rounded away what is under a tenth of a microsecond."""
        rows: list[dict[str, Any]] = [
            {
                "kernel": name,
                "launches": round((count - self.counts[name]) / num_steps, 2),
                "us": round((longer.own_us[name] - self.own_us[name]) / num_steps, 1),
            }
            for name, count in longer.counts.items()
        ]
        idle = (longer.idle_us - self.idle_us) / num_steps
        rows.append({"kernel": "(idle)", "launches": 0.0, "us": round(idle, 1)})
        return sorted((row for row in rows if row["us"] > 0), key=lambda row: -row["us"])


def share(intervals: Iterable[tuple[float, float, str]]) -> KernelTimes:
    """Divide time among (begin, end, kernel), in order of their beginnings."""
    times = KernelTimes()
    until: float | None = None
    for begin, end, name in sorted(intervals):
        if until is None:
            until = begin
        times.idle_us += max(0.0, begin - until)
        times.own_us[name] += max(0.0, end - max(begin, until))
        times.counts[name] += 1
        until = max(until, end)
    return times


def kernels_of(run: Callable[[], object]) -> KernelTimes:
    """Run it once with the GPU's own record of what it did."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return share(kernel_intervals(profile))


def kernel_intervals(profile: Any) -> Iterator[tuple[float, float, str]]:
    """When each kernel of torch's ended record began and ended, and its name."""
    for event in profile.events():
        if event.device_type.name == "CUDA":
            yield event.time_range.start, event.time_range.end, event.name
