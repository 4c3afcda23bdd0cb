"""One simulation, fully described: what a command line or a script asks for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyroots.errors import ConfigError
from manyroots.simulate.costs import CostModel
from manyroots.simulate.faults import NO_FAULTS, Faults
from manyroots.simulate.memory_traces import MEMORY_TRACES
from manyroots.simulate.result_json import point_json, run_json, setup_json
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import SimulationRun, simulate
from manyroots.simulate.sweep import Axis, Point, points
from manyroots.simulate.synthetic import SYNTHETIC, synthetic_trace
from manyroots.simulate.trace import Trace
from manyroots.simulate.trace_file import read_trace

DEFAULT_NUM_REQUESTS = {
    "chat": 300, "adapters": 1000, "rollouts": 64, "agents": 200, "scans": 400, "documents": 400,
    "reasoning": 300, **{maker.__name__: 600 for maker in MEMORY_TRACES},
}  # fmt: skip
"""Lines of a made trace: some seconds of real time each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationJob:
    """A trace and all that decides how it runs."""

    trace: Trace
    settings: SimulationSettings
    costs: CostModel
    seed: int
    faults: Faults = NO_FAULTS
    audit: bool = False

    def run(self) -> SimulationRun:
        return simulate(
            self.trace,
            self.settings,
            self.costs,
            seed=self.seed,
            faults=self.faults,
            audit=self.audit,
        )

    def sweep(self, axes: list[Axis]) -> list[Point]:
        found = points(
            axes,
            self.trace,
            self.settings,
            self.costs,
            seed=self.seed,
            faults=self.faults,
            audit=self.audit,
        )
        return list(found)

    def run_json(self, run: SimulationRun) -> dict[str, Any]:
        setup = setup_json(run.settings, self.costs, self.faults, seed=self.seed)
        return {**setup, **run_json(run)}

    def sweep_json(self, found: list[Point]) -> dict[str, Any]:
        setup = setup_json(self.settings, self.costs, self.faults, seed=self.seed)
        return {**setup, "points": [point_json(point) for point in found]}


def load_trace(name: str, *, seed: int, num_requests: int | None, every: int = 1) -> Trace:
    """A made trace by its name, or a file; of that one line of `every`, at most so many."""
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"--num-requests is {num_requests}; it must be at least 1.")
    if every < 1:
        raise ConfigError(f"--every is {every}; 1 takes every line, 10 one of ten.")
    if name in SYNTHETIC or not Path(name).exists():
        count = num_requests or DEFAULT_NUM_REQUESTS.get(name, 1)
        return synthetic_trace(name, seed=seed, num_requests=count * every)[::every]
    return read_trace(Path(name), num_requests=num_requests, every=every)
