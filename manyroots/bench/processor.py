"""What a piece of work took: seconds on the wall, and of processor time.

On a machine that others use, too, the clock on the wall counts their work as well; processor time
is the process's own, whatever else computes. `others` says which of the two counts: it is the share
of the machine's cores that other processes took meanwhile. A GPU's work is on the wall alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.05
"""From this share of the cores on, others slow what is measured."""


@dataclass(slots=True)
class Taken:
    """By one piece of work."""

    wall_s: float = 0.0
    processor_s: float = 0.0
    """Of all threads of the process."""
    others: float | None = None
    """Share of the machine's cores that other processes had; None where the system does not say."""


@contextmanager
def taken() -> Iterator[Taken]:
    """Times what happens inside; filled in at its end."""
    found = Taken()
    busy, wall, own = _busy_s(), time.perf_counter(), time.process_time()
    yield found
    found.wall_s = time.perf_counter() - wall
    found.processor_s = time.process_time() - own
    now = _busy_s()
    if busy is not None and now is not None:
        cores_s = found.wall_s * (os.cpu_count() or 1)
        # Both clocks have ticks, so a quiet machine may come out a little below nothing.
        found.others = max(0.0, (now - busy - found.processor_s) / cores_s)


def _busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Processor time of the whole machine so far, what a host took from it included."""
    try:
        numbers = [int(word) for word in stat.read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    if len(numbers) < 8:
        return None
    user, nice, system, _, _, irq, softirq, stolen, *_ = numbers
    ticks = user + nice + system + irq + softirq + stolen
    return ticks / float(os.sysconf("SC_CLK_TCK"))
