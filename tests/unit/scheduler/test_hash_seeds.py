"""Decisions are the same in every process: ranks that plan apart stay in step (N17)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from manyroots.simulate.simulation import simulate
from tests.soaks.random_case import random_case

ROOT = Path(__file__).parents[3]
NUM_CASES = 20


def main() -> None:
    """One line for each case: a digest of all its plans, page tables and copies included."""
    for seed in range(NUM_CASES):
        case = random_case(seed)
        run = simulate(case.trace, case.settings, case.costs, seed=seed, faults=case.faults)
        print(seed, run.plan_digest, run.num_retractions, sum(run.num_copied_pages.values()))


def transcript(hash_seed: str) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.scheduler.test_hash_seeds"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()


def test_n17_plans_and_victims_do_not_depend_on_the_hashes_of_a_process() -> None:
    """N17: random traffic over every mix of families, tiers, adapters and policies, under memory
    pressure, in processes whose strings have other hashes and whose sets have another order."""
    one, other = transcript("1"), transcript("2")
    assert len(one) == NUM_CASES
    assert one == other


if __name__ == "__main__":
    main()
