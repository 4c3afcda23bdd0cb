"""`manyroots bench table`: all figures that have goals, in one command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_at_least
from manyroots.errors import ConfigError


def add_table(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "table",
        _table,
        help="every figure that has a goal, with the goal and vLLM's figure (one H200, an hour)",
        description="Runs `bench decode` and `bench traffic` with the workloads of "
        "docs/performance.md, each in its own process. Prints every figure with its spread, the "
        "goal and vLLM's figure. The goals are for one H200.",
        is_failure=lambda report: bool(report["failed"]),
    )
    group.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="only this run; may be repeated; a wrong name lists all",
    )  # fmt: skip
    group.add_argument(
        "--compile-jobs", type=int, default=0, metavar="N",
        help="first compile kernels: run everything with few layers, N at a time",
    )  # fmt: skip
    group.add_argument(
        "--minutes", type=float, default=None, metavar="M", help="start no run after this time"
    )
    group.add_argument(
        "--folder", type=Path, default=None, metavar="DIR",
        help="folder for the report and the log of every run; default: a new one",
    )  # fmt: skip
    group.add_argument(
        "--with", dest="more", default="", metavar="ARGUMENTS",
        help="more arguments for every run, as one word: --with='--repeats 1'",
    )  # fmt: skip


def _table(values: dict[str, Any]) -> Report:
    from manyroots.bench.table import TableOptions, run_table
    from manyroots.bench.table_rows import RUNS

    check_at_least("compile_jobs", values["compile_jobs"], 0)
    minutes = values["minutes"]
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--minutes is {minutes}; it must be above 0.")
    known = {run.name: run for run in RUNS}
    for name in values["only"]:
        if name not in known:
            raise ConfigError(f"--only is {name!r}; choose one of {', '.join(known)}.")
    chosen = [run for name, run in known.items() if name in (values["only"] or known)]
    how = TableOptions(values["compile_jobs"], minutes, tuple(values["more"].split()))
    folder = values["folder"] or Path(tempfile.mkdtemp(prefix="manyroots-table-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run_table(chosen, how, folder)
    print(f"reports and logs of all runs: {folder}")
    return report
