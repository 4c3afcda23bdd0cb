"""`python -m tests.soaks.engine_soak --steps N`: random faulty traffic, audited at every step.

Runs seed after seed until that many steps were audited; says how many seeds, steps and seconds it
took, and every seed that failed. A seed replays alone with `--seed S --steps 1`. `slices` has the
other options: processes, and a file to go on from.
"""

from __future__ import annotations

import sys

from manyroots.cache.quick_audit import WHOLE_EVERY
from manyroots.messages import FinishReason
from manyroots.simulate.simulation import simulate
from tests.soaks.random_case import random_case
from tests.soaks.slices import Tally, command, run_slices


def run_seed(seed: int) -> tuple[dict[str, int], str | None]:
    """One random case, audited after every step: counts, and what was wrong."""
    case = random_case(seed)
    try:
        run = simulate(
            case.trace, case.settings, case.costs, seed=seed, faults=case.faults, audit=True,
            whole_audit_every=WHOLE_EVERY, digests_plans=False,
        )  # fmt: skip
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    return {
        "steps": run.num_steps,
        "steps made to fail": run.num_failed_steps,
        "aborts": sum(record.finish_reason is FinishReason.ABORT for record in run.records),
        "retractions": run.num_retractions,
        "pauses": run.num_pauses,
        "tokens reused": sum(record.num_cached_tokens for record in run.records),
        "tokens reused from the host": run.num_host_hit_tokens,
        "pages copied between tiers": sum(run.num_copied_pages.values()),
        "bad copies": run.num_bad_copies,
        "adapter loads": sum(run.num_adapter_loads.values()),
        "bad adapter loads": run.num_bad_loads,
        "adapters reloaded in flight": run.num_adapter_reloads,
    }, None


def soak(*, first_seed: int, num_steps: int, num_seeds: int, jobs: int = 1) -> Tally:
    """Seeds in order, until both that many steps and that many seeds were run."""

    def is_enough(tally: Tally) -> bool:
        return tally.counts["steps"] >= num_steps and tally.num_seeds >= num_seeds

    tally, _ = run_slices(run_seed, is_enough, first_seed=first_seed, jobs=jobs)
    return tally


def main(argv: list[str] | None = None) -> int:
    return command("tests.soaks.engine_soak", run_seed, "steps", description=__doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
