"""How long tests wait, and how they measure: the load of the machine must not decide (R06).

Tests wait for what must happen with `PATIENCE_S`, which only a wrong program uses up. They measure
what must be quick in processor time, in counts, or beside a yardstick taken at the same moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PATIENCE_S = 180.0


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes have used so far, all threads together."""
    ticks = 0
    for pid in pids:
        # After the name, which may hold spaces, user and system time are the 12th and 13th fields.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
