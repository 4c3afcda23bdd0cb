"""Runs a part of a measurement in a fresh process: JSON in on stdin, JSON out on the last line.

For what must not share a process: packages whose names clash, and memory that is to be counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import manyroots

JobArguments = dict[str, Any]


def run_module(module: str, job: JobArguments, *, extra_path: str | None = None) -> dict[str, Any]:
    """Run `python -m module` on a job; `extra_path` comes first on its import path."""
    package_home = str(Path(manyroots.__file__).parents[1])
    paths = [package_home] if extra_path is None else [extra_path, package_home]
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed with exit code {done.returncode}:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer_from_stdin(work: Callable[[JobArguments], dict[str, Any]]) -> None:
    """The other end: what a module run that way does."""
    print(json.dumps(work(json.load(sys.stdin))))
