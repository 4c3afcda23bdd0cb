"""Kernels that are compiled and graphs that are captured although the engine is ready.

Takes what Triton and the graphs report on the thread that launches steps; gives it with the next
step's result. The step that needs one waits for it, and so do all of its requests. They are
therefore logged, and counted in `manyroots:first_runs_total`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from manyroots.step import FirstRun


class _OfThread(threading.local):
    """What the steps of this thread are counted in."""

    runs: FirstRuns | None = None


class FirstRuns:
    """Those that no result has named yet."""

    def __init__(self) -> None:
        self._is_ready = False
        self._found: list[FirstRun] = []

    def begin(self) -> None:
        """The engine is ready: count from now on. Called on the thread that launches steps."""
        self._is_ready = True
        _of_thread.runs = self
        if "triton" in sys.modules:  # steps on a CPU do not use it
            from triton import knobs

            knobs.runtime.jit_post_compile_hook = _compiled

    def note(self, kind: str, name: object) -> None:
        if self._is_ready:
            self._found.append(FirstRun(kind, str(name)))

    def take(self) -> tuple[FirstRun, ...]:
        if not self._found:
            return ()
        found, self._found = tuple(self._found), []
        return found


_of_thread = _OfThread()


def _compiled(*, fn: Any, **_: Any) -> None:
    """Triton's hook: a form of a kernel was compiled, or read from its cache on disk, because it is
    new to this process."""
    if _of_thread.runs is not None:
        module = fn.module.removeprefix("manyroots.kernels.")
        _of_thread.runs.note("kernel", f"{module}.{fn.name}")
