"""Speculation in the simulator: the same tokens, and the time that steps with guesses take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyroots.errors import ConfigError
from manyroots.simulate.costs import StepLoad
from manyroots.simulate.faults import Faults
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.simulation import SimulationRun, simulate
from manyroots.simulate.synthetic import synthetic_trace
from manyroots.simulate.trace import TraceRequest
from tests.unit.simulate.traces import COSTS, line

SETTINGS = SimulationSettings(num_pages=1000, max_num_seqs=8)
DRAFTS = replace(SETTINGS, num_speculative_tokens=4)


def run(settings: SimulationSettings, *lines: TraceRequest, audit: bool = True) -> SimulationRun:
    return simulate(lines, settings, COSTS, seed=0, audit=audit)


def decode_s(run: SimulationRun) -> float:
    [record] = run.records
    return record.e2e_s - record.ttft_s


@pytest.mark.parametrize("audit", [False, True])
def test_checked_positions_are_rows_and_wait_for_the_result_before(audit: bool) -> None:
    """P11: the first drafts have two tokens, as an unknown namespace gets; all are right."""
    one = line(0.0, ("p", 100), output_tokens=4)
    first = run(replace(DRAFTS, acceptance=1.0), one, audit=audit)
    assert (first.num_draft_tokens, first.num_accepted_tokens, first.num_steps) == (2, 2, 2)
    checks = COSTS.step_s(StepLoad(0, 0, 3, 101 + 102 + 103))
    assert decode_s(first) == pytest.approx(COSTS.unoverlapped_step_s + checks)


@pytest.mark.parametrize("audit", [False, True])
def test_right_guesses_save_steps_and_wrong_ones_cost_little(audit: bool) -> None:
    """Against what the cost model says of a run without speculation; wrong guesses stop soon."""
    one = line(0.0, ("p", 100), output_tokens=400)
    plain = decode_s(run(SETTINGS, one, audit=audit))
    found = {}
    for acceptance in (0.0, 0.7, 1.0):
        drafting = run(replace(DRAFTS, acceptance=acceptance), one, audit=audit)
        found[acceptance] = plain / decode_s(drafting)
    assert 0.95 < found[0.0] <= 1.0
    assert 1.6 < found[0.7] < 2.4
    assert 2.8 < found[1.0] < 5.0


def test_guesses_change_no_token_with_faults_and_little_memory() -> None:
    """Records raise where a sequence says anything but what the trace says; pages are audited."""
    trace = synthetic_trace("chat", seed=3, num_requests=24)
    settings = replace(DRAFTS, num_pages=600, block_size=16, max_num_batched_tokens=256)
    faults = Faults(failed_steps=0.02, aborts=0.1)
    result = simulate(trace, settings, COSTS, seed=5, faults=faults, audit=True)
    assert result.num_accepted_tokens > 0
    assert result.num_failed_steps > 0
    again = simulate(trace, settings, COSTS, seed=5, faults=faults, audit=True)
    assert again.plan_digest == result.plan_digest


def test_more_rows_than_are_drafted_for_run_as_without() -> None:
    lines = [line(0.0, (f"p{number}", 32), output_tokens=20) for number in range(40)]
    wide = replace(SETTINGS, max_num_seqs=64)
    plain = simulate(lines, wide, COSTS, seed=0)
    drafting = simulate(lines, replace(wide, num_speculative_tokens=4), COSTS, seed=0)
    assert drafting.num_draft_tokens == 0
    assert drafting.duration_s == pytest.approx(plain.duration_s, rel=0.02)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="--speculate is 9; it must be from 0 to 8"):
        SimulationSettings(num_speculative_tokens=9)
    with pytest.raises(ConfigError, match=r"--acceptance is 1\.5; it must be from 0 to 1"):
        SimulationSettings(acceptance=1.5)
