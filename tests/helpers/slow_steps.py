"""Processes whose engine takes its time, so that what is sent to them comes in the midst of an
answer however slow the machine is."""

from __future__ import annotations

import os
from pathlib import Path

STEP_S = 0.25


def slow_steps(folder: Path, *, while_there: Path | None = None) -> dict[str, str]:
    """An environment for them; `folder` is for a file that their interpreter finds. Each step is
    told on stderr, counted from the last moment without work. `while_there`: only while this file
    exists."""
    file = "/" if while_there is None else str(while_there)
    (folder / "sitecustomize.py").write_text(_PATCH.replace("FILE", repr(file)))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


_PATCH = f"""
import os, sys, time
from importlib.abc import MetaPathFinder

class Patch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        # Imported after the loop by the code that runs it.
        if name in ("manyroots.cli.generate", "manyroots.cli.chat", "manyroots.engine.wire"):
            from manyroots.engine.loop import EngineLoop
            if not hasattr(EngineLoop, "quick_step"):
                EngineLoop.quick_step, EngineLoop.step = EngineLoop.step, slow_step
        return None

count = 0

def slow_step(self):
    global count
    news = self.quick_step()
    if self.has_work:
        count += 1
        print("step", count, file=sys.stderr, flush=True)
        if os.path.exists(FILE):
            time.sleep({STEP_S})
    else:
        count = 0
    return news

sys.meta_path.insert(0, Patch())
"""
