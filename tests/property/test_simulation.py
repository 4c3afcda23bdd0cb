"""Random faulty traffic through the simulator, audited after every step, and replayed exactly.

MANYROOTS_SOAK_STEPS asks for more steps than the default; `python -m manyroots.simulate.soak` runs
the same from the command line.
"""

from __future__ import annotations

import os

import pytest

from manyroots.simulate.random_case import random_case
from manyroots.simulate.simulation import Run, simulate
from manyroots.simulate.soak import run_seed, soak

NUM_SEEDS = 500
NUM_STEPS = int(os.environ.get("MANYROOTS_SOAK_STEPS", "100000"))
WORKERS = min(4, os.cpu_count() or 1)


def run_case(seed: int) -> Run:
    case = random_case(seed)
    return simulate(
        case.trace, case.settings, case.costs, seed=seed, faults=case.faults, audit=True
    )


def test_r01_every_invariant_holds_after_every_step_of_faulty_random_traffic() -> None:
    """R01, H10, H13, T08: 500 seeds and 100,000 audited steps at least, over every mix of families,
    tiers and policies, with failed steps, aborts, bursts, memory pressure, bad and late copies,
    and adapters reloaded in flight; every page read is checked, and every request gets its own
    tokens."""
    report = soak(first_seed=0, num_steps=NUM_STEPS, num_seeds=NUM_SEEDS, workers=WORKERS)
    print(report)
    assert not report.failures, report.failures[:5]
    assert report.num_seeds >= NUM_SEEDS
    assert report.num_steps >= NUM_STEPS
    # The traffic is worth the name: each kind of trouble was met, again and again.
    assert report.num_failed_steps > 300
    assert report.num_aborts > 500
    assert report.num_retractions > 500
    assert report.num_cached_tokens > 5_000
    assert report.num_host_hit_tokens > 800
    assert report.num_copied_pages > 10_000
    assert report.num_bad_copies > 1_000
    assert report.num_adapter_loads > 500
    assert report.num_bad_loads > 50
    assert report.num_adapter_reloads > 150


@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_r01_a_seed_replays_exactly(seed: int) -> None:
    """R01: the same seed gives the same plans and the same times, to the last bit."""
    one, other = run_case(seed), run_case(seed)
    assert one == other
    assert one.plan_digest != run_case(seed + 1).plan_digest


@pytest.mark.parametrize("seed", [103390, 104280, 207531, 209151])
def test_r01_requests_do_not_take_each_others_place_for_ever(seed: int) -> None:
    """R01: seeds that once went on for ever, or nearly. In the way of the one that ran were pages
    that waiting requests had loaded, or had copied because they were claimed in every step, and
    others' copies of its own pages."""
    run = run_case(seed)
    assert run.num_retractions < 5 * len(run.records)


def test_r01_a_failure_names_the_seed_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """R01: a broken invariant ends the run of its seed, and no other."""

    def broken(cache: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("manyroots.simulate.engine.audit", broken)
    outcome = run_seed(17)
    assert outcome.failure == "SimulationError: seed 17, round 1: planted"
    assert run_seed(17) == outcome
    monkeypatch.undo()
    assert run_seed(17).failure is None
