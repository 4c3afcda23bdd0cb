"""Which cores a process may use: engines on one of their own, everything else on the others."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from manyroots.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cores:
    """Of this machine, in two parts."""

    engine: frozenset[int]
    rest: frozenset[int]

    @classmethod
    def divided(cls) -> Cores:
        """Of those that this process may use; ConfigError if that is one."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(usable) < 2:
            raise ConfigError(
                "--pin gives the engine a core of its own, and this process has "
                f"{len(usable) or 'no say in its cores'}; leave the flag out."
            )
        return cls(frozenset(usable[-1:]), frozenset(usable[:-1]))


def put_on(pid: int, cores: frozenset[int]) -> None:
    """All threads that a process has now; those that they begin later are where they are."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cores)
