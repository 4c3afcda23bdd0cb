"""`manyroots bench traffic`: whole requests of mixed sizes through the engine, below text and HTTP.

Prefix cache on; every run has a cold one, by a salt of its own. Warmed up with runs of the same
requests before. What counts is the time until the last request has ended, the median of the runs
with its spread. With `load`, the same requests come one by one, at random (Poisson), at that share
of the rate that the engine just kept up with; then time to the first token counts. With `profile`,
one more run says where the time went. Cases that want the same settings run on one engine.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyroots.bench.drive import Timeline, drive
from manyroots.bench.kernel_profile import KernelTimes
from manyroots.bench.machine import describe_machine
from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.spread import percentile, spread
from manyroots.bench.step_profile import (
    PROFILED_STEPS,
    WatchedRunner,
    WatchedStep,
    show,
    steps_by_kind,
)
from manyroots.bench.traffic_cases import TrafficCase, adapter_name
from manyroots.bench.words import PROJECTIONS
from manyroots.config import EVERY_MODULE, engine_settings
from manyroots.engine.build import Engine, build_engine, free_memory
from manyroots.models.source import resolve_source
from manyroots.process.progress import told_to
from manyroots.step import Runner

MARGIN_TOKENS = 16
DEFAULTS: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


@dataclass(frozen=True, slots=True)
class TrafficRuns:
    """How the cases are run."""

    repeats: int
    with_base: bool
    """Also the same requests without their adapters, alternately."""
    load: float | None
    """None: no run with arrivals."""
    warm_ups: int = 2
    profile: bool = False
    num_layers: int | None = None
    """At most so many of the `model_config`'s; None: all."""
    one_engine: bool = False
    """Whether all cases run on one engine, which knows the adapters of the case that has most."""


def run_traffic(
    cases: list[TrafficCase], runs: TrafficRuns, model_config: str | None, engine: dict[str, Any]
) -> dict[str, Any]:
    """Measure every case; prints a table as it goes and gives the report. `model_config` is a shape
    with random weights; None: the settings' own model."""
    report: dict[str, Any] = {
        "bench": "traffic",
        "model_config": model_config,
        "num_layers": runs.num_layers or "all",
        "engine": {**DEFAULTS, **engine},
        "warm_ups": runs.warm_ups,
        "prefix_cache": "on, cold for every run",
        "machine": describe_machine(),
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        folder = Path(home)
        own: dict[str, Any] = {}
        if model_config is not None:
            model = write_config(model_config, folder, runs.num_layers)
            own = {"model": str(model), "load_format": "dummy"}
        groups: list[tuple[dict[str, Any], list[TrafficCase]]] = []
        for case in cases:
            alike = cases if runs.one_engine else [case]
            most = max(other.max_len for other in alike) + MARGIN_TOKENS
            settings = {**DEFAULTS, "max_model_len": most, **own, **engine}
            largest = max(alike, key=lambda other: other.num_adapters)
            settings = {**_adapters(largest, settings, folder), **settings}
            members = next((found for other, found in groups if other == settings), None)
            if members is None:
                groups.append((settings, [case]))
            else:
                members.append(case)
        for settings, members in groups:
            report["cases"].extend(_measured(settings, members, runs))
    return report


def _measured(
    settings: dict[str, Any], cases: list[TrafficCase], runs: TrafficRuns
) -> list[dict[str, Any]]:
    """Of cases on one engine, which is released when this returns."""
    with _engine(settings) as (engine, watched, start):
        _say(f"engine start {start['start_s']} s: {start['start_stages_s']}")
        return [{**start, **_Case(case, runs, engine, watched).measure()} for case in cases]


def _adapters(case: TrafficCase, settings: dict[str, Any], home: Path) -> dict[str, Any]:
    """Settings that know the case's adapters, which are written as files: the same ones for cases
    that want the same."""
    if case.num_adapters == 0:
        return {}
    ranks = "-".join(map(str, case.ranks))
    folder = home / f"{case.num_adapters}-of-rank-{ranks}-on-{len(case.projections)}"
    targets = targets_of(resolve_source(engine_settings(settings).model))
    paths: dict[int, Path] = {}
    stride = len(case.ranks)
    for first, rank in enumerate(case.ranks):
        numbers = range(first, case.num_adapters, stride)
        written = write_adapters(
            targets, folder, len(numbers), rank,
            projections=case.projections, first=first, stride=stride,
        )  # fmt: skip
        paths.update(zip(numbers, written, strict=True))
    modules = [f"{adapter_name(number)}={paths[number]}" for number in range(case.num_adapters)]
    return {
        "enable_lora": True,
        "lora_modules": tuple(modules),
        "max_lora_rank": max(case.ranks),
        # As the operator of a server with only such adapters would set it.
        "lora_target_modules": (
            EVERY_MODULE if case.projections == PROJECTIONS else case.projections
        ),
    }


@contextmanager
def _engine(
    settings: dict[str, Any],
) -> Iterator[tuple[Engine, WatchedRunner, dict[str, Any]]]:
    # What the last engine had must be free before this one asks how much memory is left.
    free_memory()
    began = time.perf_counter()
    watched: list[WatchedRunner] = []

    def watch(runner: Runner) -> Runner:
        watched.append(WatchedRunner(runner))
        return watched[0]

    with told_to(lambda _: None) as stages:
        engine = build_engine(engine_settings(settings), watch)
    start = {
        "start_s": round(time.perf_counter() - began, 2),
        "start_stages_s": {name: round(taken, 2) for name, taken in stages.items()},
    }
    try:
        yield engine, watched[0], start
    finally:
        engine.loop.close()


class _Case:
    """One case on its engine."""

    _ids = itertools.count(1)
    _salts = map(str, itertools.count())
    """Of all cases: those on one engine must not find each other's prompts."""

    def __init__(
        self, case: TrafficCase, runs: TrafficRuns, engine: Engine, watched: WatchedRunner
    ) -> None:
        self._case, self._runs, self._engine, self._watched = case, runs, engine, watched
        self._num_looked_up = self._num_hit = 0
        self._waited_for: list[dict[str, int]] = []
        """Kernels that were compiled and graphs that were captured during each run."""
        self._steps: list[list[WatchedStep]] = []
        """Of each run."""

    def measure(self) -> dict[str, Any]:
        case, has_base = self._case, self._runs.with_base and self._case.num_adapters > 0
        kinds = [True, False] if has_base else [True]
        for _, kind in itertools.product(range(self._runs.warm_ups), kinds):
            self._run(with_adapters=kind)
        lines: dict[bool, list[Timeline]] = {kind: [] for kind in kinds}
        for _, kind in itertools.product(range(self._runs.repeats), kinds):
            lines[kind].append(self._run(with_adapters=kind))
        figures = {"case": case.name, "workload": case.described(), **_figures(lines[True])}
        figures["hit_rate"] = round(self._num_hit / max(1, self._num_looked_up), 4)
        figures["made_in_runs"] = self._waited_for
        figures["steps"] = [steps_by_kind(steps) for steps in self._steps]
        _show(case.name, figures)
        _say(f"{'':>26}  runs {figures['run_seconds']} s, made in them {self._waited_for}")
        if self._runs.profile:
            figures["profile"] = self._profile()
        if has_base:
            figures["base"] = _figures(lines[False])
            _show("the same without adapters", figures["base"])
            share = figures["base"]["seconds"]["median"] / figures["seconds"]["median"]
            figures["share_of_base"] = round(share, 3)
            _say(f"{'':>26}  {share:.3f} of base; {_shares(figures)} run by run")
        if self._runs.load is not None:
            figures["poisson"] = {
                "with adapters" if kind and case.num_adapters else "base": self._under_load(
                    lines[kind], with_adapters=kind
                )
                for kind in kinds
            }
        return figures

    def _under_load(self, lines: list[Timeline], *, with_adapters: bool) -> dict[str, Any]:
        """The base's rate is its own, so that each is measured at the same share of what it can."""
        assert self._runs.load is not None
        seconds = spread([line.seconds for line in lines])["median"]
        rate = self._runs.load * self._case.num_requests / seconds
        rng = np.random.default_rng(1)
        due = np.cumsum(rng.exponential(1 / rate, self._case.num_requests)).tolist()
        line = self._run(with_adapters=with_adapters, due_s=due)
        figures = {"load": self._runs.load, "requests_per_s": round(rate, 4), **_latencies([line])}
        _say(f"{'':>26}  at {self._runs.load:.0%} load  {_shown(figures)}")
        return figures

    def _profile(self) -> dict[str, Any]:
        """Of the steps of one run; on a GPU of another one's kernels, which are slower to note."""
        self._run(with_adapters=True)
        kinds = steps_by_kind(self._watched.steps)
        kernels: list[dict[str, Any]] = []
        middle = len(self._watched.steps) // 2
        if torch.cuda.is_available():
            self._run(with_adapters=True, profiled=range(middle, middle + PROFILED_STEPS))
            if self._watched.kernels is not None:
                kernels = KernelTimes().per_step(self._watched.kernels, PROFILED_STEPS)
        show(self._case.name, kinds, kernels)
        return {"steps": kinds, "kernels_per_step": kernels}

    def _run(
        self,
        *,
        with_adapters: bool,
        due_s: list[float] | None = None,
        profiled: range = range(0),
    ) -> Timeline:
        self._watched.watch(profiled)
        vocab_size = self._engine.info.vocab_size
        submits = self._case.submits(
            vocab_size, next(self._salts), self._ids, with_adapters=with_adapters
        )
        before = self._engine.loop.stats()
        line = drive(self._engine, submits, due_s)
        after = self._engine.loop.stats()
        self._num_looked_up += after.total_lookup_tokens - before.total_lookup_tokens
        self._num_hit += after.total_hit_tokens - before.total_hit_tokens
        self._waited_for.append(
            {kind: count - before.first_runs[kind] for kind, count in after.first_runs.items()}
        )
        self._steps.append(self._watched.steps)
        return line


def _figures(lines: list[Timeline]) -> dict[str, Any]:
    return {
        "seconds": spread([line.seconds for line in lines]),
        "run_seconds": [round(line.seconds, 3) for line in lines],
        "output_tokens": lines[0].num_tokens,
        "output_tokens_per_s": spread([line.num_tokens / line.seconds for line in lines], 1),
        **_latencies(lines),
    }


def _shares(figures: dict[str, Any]) -> list[float]:
    """The base's median seconds of each run's."""
    base = figures["base"]["seconds"]["median"]
    return [round(base / seconds, 3) for seconds in figures["run_seconds"]]


def _latencies(lines: list[Timeline]) -> dict[str, Any]:
    """Of each run by itself."""

    def of(share: float) -> dict[str, Any]:
        firsts = [[times.to_first_s for times in line.requests.values()] for line in lines]
        return spread([percentile(seconds, share) for seconds in firsts])

    return {"time_to_first_token_s": {"p50": of(0.5), "p90": of(0.9), "p99": of(0.99)}}


def _show(name: str, figures: dict[str, Any]) -> None:
    seconds, rate = figures["seconds"], figures["output_tokens_per_s"]
    _say(
        f"{name:>26}  {seconds['median']:8.2f} s ({seconds['least']:.2f} to {seconds['most']:.2f})"
        f"  {rate['median']:9.1f} tok/s  {_shown(figures)}"
    )


def _shown(figures: dict[str, Any]) -> str:
    first = figures["time_to_first_token_s"]
    p50, p99 = first["p50"]["median"], first["p99"]["median"]
    return f"first token {p50:.3f} s (p50) {p99:.3f} s (p99)"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
