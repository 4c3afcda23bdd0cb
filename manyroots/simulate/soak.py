"""`python -m manyroots.simulate.soak --steps N --seed S`: random faulty traffic, audited.

Runs seed after seed until that many steps were audited; says how many seeds, steps and seconds it
took, and every seed that failed. A seed replays alone with `--seed S --steps 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from manyroots.messages import FinishReason
from manyroots.simulate.random_case import random_case
from manyroots.simulate.simulation import simulate

SEEDS_PER_TASK = 5
TASKS_PER_WORKER = 20
"""Handed out at once; all are done before more are."""


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What one seed's run came to."""

    seed: int
    num_steps: int = 0
    """Steps launched, each audited."""
    num_failed_steps: int = 0
    num_retractions: int = 0
    num_aborts: int = 0
    num_cached_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_copied_pages: int = 0
    num_bad_copies: int = 0
    num_adapter_loads: int = 0
    num_bad_loads: int = 0
    num_adapter_reloads: int = 0
    failure: str | None = None


COUNTS = tuple(
    spec.name for spec in dataclasses.fields(SeedOutcome) if spec.name not in ("seed", "failure")
)


@dataclass(slots=True)
class SoakReport:
    """Totals over seeds."""

    first_seed: int
    num_seeds: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_retractions: int = 0
    num_aborts: int = 0
    num_cached_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_copied_pages: int = 0
    num_bad_copies: int = 0
    num_adapter_loads: int = 0
    num_bad_loads: int = 0
    num_adapter_reloads: int = 0
    failures: list[SeedOutcome] = field(default_factory=list)

    def add(self, outcome: SeedOutcome) -> None:
        self.num_seeds += 1
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        if outcome.failure is not None:
            self.failures.append(outcome)

    def __str__(self) -> str:
        return (
            f"seeds {self.first_seed} to {self.first_seed + self.num_seeds - 1}: "
            f"{self.num_steps} audited steps, {self.num_failed_steps} made to fail, "
            f"{self.num_aborts} aborts, {self.num_retractions} retractions, "
            f"{self.num_cached_tokens} tokens reused, {self.num_host_hit_tokens} of them from the "
            f"host, {self.num_copied_pages} pages copied between tiers, {self.num_bad_copies} bad "
            f"copies, {self.num_adapter_loads} adapter loads, {self.num_bad_loads} bad ones, "
            f"{self.num_adapter_reloads} reloads in flight, {len(self.failures)} failures"
        )


def run_seed(seed: int) -> SeedOutcome:
    """One random case, audited after every step."""
    case = random_case(seed)
    try:
        run = simulate(
            case.trace, case.settings, case.costs, seed=seed, faults=case.faults, audit=True
        )
    except Exception as error:
        return SeedOutcome(seed, failure=f"{type(error).__name__}: {error}")
    return SeedOutcome(
        seed=seed,
        num_steps=run.num_steps,
        num_failed_steps=run.num_failed_steps,
        num_retractions=run.num_retractions,
        num_aborts=sum(record.finish_reason is FinishReason.ABORT for record in run.records),
        num_cached_tokens=sum(record.num_cached_tokens for record in run.records),
        num_host_hit_tokens=run.num_host_hit_tokens,
        num_copied_pages=sum(run.num_copied_pages.values()),
        num_bad_copies=run.num_bad_copies,
        num_adapter_loads=sum(run.num_adapter_loads.values()),
        num_bad_loads=run.num_bad_loads,
        num_adapter_reloads=run.num_adapter_reloads,
    )


def soak(*, first_seed: int, num_steps: int, num_seeds: int, workers: int = 1) -> SoakReport:
    """Seeds in order, until both that many steps and that many seeds were run."""
    report = SoakReport(first_seed)
    for outcome in _outcomes(first_seed, workers):
        report.add(outcome)
        if report.num_steps >= num_steps and report.num_seeds >= num_seeds:
            break
    return report


def _outcomes(first_seed: int, workers: int) -> Iterator[SeedOutcome]:
    if workers == 1:
        yield from map(run_seed, itertools.count(first_seed))
        return
    size = workers * TASKS_PER_WORKER * SEEDS_PER_TASK
    # Fresh processes: a fork would carry over the threads and locks of whoever calls this.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for begin in itertools.count(first_seed, size):
            yield from pool.map(run_seed, range(begin, begin + size), chunksize=SEEDS_PER_TASK)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manyroots.simulate.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, metavar="N")
    parser.add_argument("--num-seeds", type=int, default=1, metavar="N", help="at least this many")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first one")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    report = soak(
        first_seed=arguments.seed,
        num_steps=arguments.steps,
        num_seeds=arguments.num_seeds,
        workers=arguments.workers,
    )
    elapsed_s = time.monotonic() - began
    print(f"{report}; {elapsed_s:.1f} s, {report.num_steps / elapsed_s:.0f} steps/s")
    for outcome in report.failures:
        print(f"  {outcome.failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
