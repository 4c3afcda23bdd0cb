"""The preset beside what `bench serve` measured over HTTP on the machine that it describes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from manyroots.bench.serve import Arrivals
from manyroots.bench.traffic_cases import CASES
from manyroots.simulate.presets import H200_QWEN3_8B
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import SimulationRun, simulate
from manyroots.simulate.summary import summarize
from manyroots.simulate.trace import Trace, TraceRequest, TraceSegment


@dataclass(frozen=True)
class Measured:
    """One H200, Qwen3-8B's shape, 2026-11-16: docs/performance.md, "HTTP"."""

    num_requests: int
    rate: float | None
    seed: int
    seconds: float
    between_p50_s: float
    whole_p50_s: float
    whole_p99_s: float


LOADS = {
    "160 at once": Measured(160, None, 100, 4.004, 8.6e-3, 3.143, 3.968),
    "30% load": Measured(48, 11.988, 101, 4.007, 4.6e-3, 0.723, 1.500),
    "60% load": Measured(96, 23.976, 102, 4.779, 5.1e-3, 0.913, 1.755),
    "90% load": Measured(144, 35.964, 103, 5.374, 6.2e-3, 1.259, 2.561),
}


def as_sent(load: Measured) -> Trace:
    """The requests of the case, at the moments at which the load generator sends them."""
    case = CASES["mixed-greedy"]
    submits = case.submits(1000, "", itertools.count(1), with_adapters=False)[: load.num_requests]
    due = Arrivals(rate=load.rate).due_s(load.num_requests, load.seed)
    return tuple(
        TraceRequest(
            arrival_s=at,
            prompt=(TraceSegment(f"prompt-{number}", len(submit.prompt)),),
            adapter=None,
            salt=None,
            output_tokens=submit.sampling.max_tokens or 1,
        )
        for number, (submit, at) in enumerate(zip(submits, due, strict=True))
    )


def simulated(load: Measured) -> SimulationRun:
    settings = SimulationSettings(
        num_pages=H200_QWEN3_8B.costs.num_pages(16), max_num_seqs=256, max_num_batched_tokens=8192
    )
    return simulate(as_sent(load), settings, H200_QWEN3_8B.costs, seed=0)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_b05_the_preset_agrees_with_what_was_served(load: Measured) -> None:
    """B05: seconds of all, time between tokens and whole requests within 15%. First tokens take
    longer over HTTP than here, where nothing but steps takes time: 38 to 65 ms instead of 26 to 38
    in the middle."""
    found = summarize(simulated(load))
    assert found.duration_s == pytest.approx(load.seconds, rel=0.15)
    assert found.itl_s.p50 == pytest.approx(load.between_p50_s, rel=0.15)
    assert found.e2e_s.p50 == pytest.approx(load.whole_p50_s, rel=0.15)
    assert found.e2e_s.p99 == pytest.approx(load.whole_p99_s, rel=0.15)
