"""`bench scheduler`: what planning and advancing cost, without a model, ours and peers' in turn.

Every figure is thread CPU time and the median of the repeats, with the least and the most. Each
repeat of each system has a fresh process, and within a repeat the systems follow each other, so
that a busy spell of the machine hits all of them. Prints a table and gives the report.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from manyroots.bench.manyroots_driver import SchedulerDriver
from manyroots.bench.own_process import JobArguments, answer_from_stdin, run_module
from manyroots.bench.peer_schedulers import measure_peer, peer_name
from manyroots.bench.scheduler_cases import measure_all
from manyroots.bench.scheduler_tenants import measure_tenants, tenant_lines
from manyroots.bench.scheduler_trace import SchedulerWorkload

OURS = "manyroots"
SPREAD = ("systems", "least", "most")
PER_REQUEST = {
    "submit": "submit_us_per_request",
    "plan": "plan_us_per_request",
    "plan + advance": "plan_and_advance_us_per_request",
}

MeasureFunction = Callable[[SchedulerWorkload, int], dict[str, Any]]


def run_scheduler(
    workload: SchedulerWorkload,
    page_sizes: list[int],
    peers: list[Path],
    repeats: int,
    tenants: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Measure every page size; the report holds the workload and every figure."""
    systems: dict[str, MeasureFunction] = {OURS: measure_ours}
    systems |= {peer_name(folder): partial(measure_peer, folder) for folder in peers}
    runs = []
    for page_size in page_sizes:
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for repeat in range(repeats):
            for name, measure in systems.items():
                print(f"page {page_size}, {repeat + 1} of {repeats}: {name}", file=sys.stderr)
                measured[name].append(measure(workload, page_size))
        figures = {
            key: {name: combined(found, how) for name, found in measured.items()}
            for key, how in (("systems", statistics.median), ("least", min), ("most", max))
        }
        runs.append({"page_size": page_size, **figures})
    report: dict[str, Any] = {
        "workload": asdict(workload),
        "clock": "thread CPU time",
        "repeats": repeats,
        "runs": runs,
    }
    print(table(report))
    if tenants:
        print("tenants", file=sys.stderr)
        report["tenants"] = measure_tenants(tenants)
        print("\n".join(tenant_lines(report["tenants"])))
    return report


def measure_ours(workload: SchedulerWorkload, page_size: int) -> dict[str, Any]:
    """Every case once, in a process of its own."""
    job = {"workload": asdict(workload), "page_size": page_size}
    return run_module("manyroots.bench.scheduler", job)


def combined(found: list[Any], how: Callable[[list[float]], float]) -> Any:
    """Reports of one shape, number by number."""
    first = found[0]
    if isinstance(first, dict):
        return {name: combined([each[name] for each in found], how) for name in first}
    if isinstance(first, list):
        return [combined(list(each), how) for each in zip(*found, strict=True)]
    return how(found)


def table(report: dict[str, Any]) -> str:
    """The figures side by side, each followed by the least to the most. A step is planning and
    advancing, planning alone in brackets."""
    lines = []
    for run in report["runs"]:
        systems = run["systems"]
        lines.append(f"page {run['page_size']:<26}" + "".join(f"{name:>28}" for name in systems))
        figures = [_lines_of(*(run[key][name] for key in SPREAD)) for name in systems]
        for label in figures[0]:
            cells = "".join(f"{each.get(label, '-'):>28}" for each in figures)
            lines.append(f"  {label:<29}{cells}")
    return "\n".join(lines)


def _lines_of(
    figures: dict[str, Any], least: dict[str, Any], most: dict[str, Any]
) -> dict[str, str]:
    trace, burst = figures["trace"], figures["burst"]
    lines = {"hit rate (best)": f"{trace['hit_rate']:.4f} ({trace['best_hit_rate']:.4f})"}
    for label, name in PER_REQUEST.items():
        low, high = (each["trace"][name] for each in (least, most))
        lines[f"{label}, us/request"] = f"{trace[name]:.1f} [{low:.1f}-{high:.1f}]"
    steps = {"step with prefill": "prefill_step", "decode-only step": "decode_step"}
    for label, name in steps.items():
        lines[f"{label}, ms"] = _step(*(each["trace"][name] for each in (figures, least, most)))
    for kind, label in (("decode", "decode at batch"), ("waiting", "  with")):
        cases = zip(*(each[kind] for each in (figures, least, most)), strict=True)
        for case in cases:
            count = case[0]["batch" if kind == "decode" else "waiting"]
            behind = "" if kind == "decode" else " waiting"
            lines[f"{label} {count:.0f}{behind}, ms"] = _step(*case)
    for name in ("as_budgeted", "one_step"):
        lines[f"burst {name.replace('_', ' ')}, hit rate"] = (
            f"{burst[name]['hit_rate']:.4f} ({burst['best_hit_rate']:.4f})"
        )
    return lines


def _step(figures: dict[str, Any], least: dict[str, Any], most: dict[str, Any]) -> str:
    if not figures["num_steps"]:
        return "-"
    whole = "plan_and_advance_ms"
    return f"{figures[whole]:.3f} ({figures['plan_ms']:.3f}) [{least[whole]:.3f}-{most[whole]:.3f}]"


def _work(job: JobArguments) -> dict[str, Any]:
    workload = SchedulerWorkload.from_json(job["workload"])
    return measure_all(workload, job["page_size"], SchedulerDriver)


if __name__ == "__main__":
    answer_from_stdin(_work)
