"""`manyroots bench table`: every figure that this project holds itself to, beside its goal.

Each run is a process of its own, so that none finds another's memory, threads or warm clocks. A
GPU compiles for minutes on one core before it measures for seconds; so `compile_jobs` first runs
everything with few layers, that many at a time, which leaves the same kernels in Triton's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyroots.bench.machine import describe_machine
from manyroots.bench.table_rows import TableRow, TableRun
from manyroots.process.torch_allocator import callers_environment

COMPILED = ("--layers", "4", "--repeats", "1", "--num-gpu-blocks-override", "16384")
"""After a run's own arguments. So many pages, because several engines share the memory."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How the table is filled."""

    compile_jobs: int = 0
    """0: nothing is compiled beforehand."""
    minutes: float | None = None
    """No run begins later than that; None: all of them run."""
    more: tuple[str, ...] = ()
    """Further arguments of every run."""


def run_table(runs: Sequence[TableRun], how: TableOptions, folder: Path) -> dict[str, Any]:
    """Measure every row; prints the table as it grows. Reports and logs of runs go to `folder`."""
    began = time.monotonic()
    report: dict[str, Any] = {
        "bench": "table", "machine": describe_machine(), "rows": [], "failed": [], "not_run": [],
    }  # fmt: skip
    if how.compile_jobs:
        report["compile"] = _compile(runs, how, folder)
    _say(f"{'':>42}  {'goal':>9}  {'vLLM':>9}  figure")
    for run in runs:
        if how.minutes is not None and time.monotonic() - began > 60 * how.minutes:
            report["not_run"].append(run.name)
            continue
        target = folder / f"{run.name}.json"
        code = _bench((*run.arguments, *how.more), target, folder / f"{run.name}.log")
        if code != 0:
            report["failed"].append(run.name)
            _say(f"{run.name} failed with exit code {code}; see {folder / f'{run.name}.log'}")
            continue
        measured = json.loads(target.read_text())
        report["rows"] += [_row(run, row, measured, how) for row in run.rows]
    for name in report["not_run"]:
        _say(f"{name} was not run: its time was over")
    return report


def _compile(runs: Sequence[TableRun], how: TableOptions, folder: Path) -> dict[str, Any]:
    """What fails here fails again where it counts, and is said there."""
    began = time.monotonic()

    def compile_one(run: TableRun) -> int:
        name = f"{run.name}-compile"
        given = (*run.arguments, *COMPILED, *how.more)
        return _bench(given, folder / f"{name}.json", folder / f"{name}.log", quiet=True)

    with ThreadPoolExecutor(how.compile_jobs) as pool:
        codes = dict(zip((run.name for run in runs), pool.map(compile_one, runs), strict=True))
    taken = round(time.monotonic() - began, 1)
    _say(f"compiled in {taken} s")
    return {"seconds": taken, "exit_codes": codes}


def _bench(arguments: Sequence[str], target: Path, log: Path, *, quiet: bool = False) -> int:
    command = [sys.executable, "-m", "manyroots.cli", "bench", *arguments, "--json", str(target)]
    # Several at once on few cores: libraries' threads would only get in each other's way.
    few = {"OMP_NUM_THREADS": "1"} if quiet else {}
    with log.open("w") as file:
        return subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**callers_environment(), **few},
            check=False,
        ).returncode


def _row(
    run: TableRun, row: TableRow, measured: dict[str, Any], how: TableOptions
) -> dict[str, Any]:
    median, least, most = row.read(measured)
    verdict = "met" if row.is_met(median) else f"missed by {row.missed_by(median):.1%}"
    vllm = "-" if row.vllm is None else f"{row.vllm:g}"
    _say(
        f"{row.name:>42}  {row.goal:>9g}  {vllm:>9}  {median:.5g} ({least:.5g} to {most:.5g}), "
        f"{verdict}"
    )
    return {
        "row": row.name, "goal": row.goal, "vllm": row.vllm, "median": median, "least": least,
        "most": most, "is_met": row.is_met(median), "run": run.name,
        "command": " ".join(("manyroots", "bench", *run.arguments, *how.more)),
    }  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
