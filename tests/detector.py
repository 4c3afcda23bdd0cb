"""Fast tests of the decide half, ended by the first that fails; for `test_mutations`.

`python -m tests.detector` in a folder with a copy of the package and the tests: exits with 0 if
everything passes, and with 1 if something was noticed, saying what.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

import manyroots
from tests.deciding import Deciding
from tests.property.cache_oracle import Walk
from tests.property.test_families_and_tiers import run

UNIT_TESTS = ("tests/unit/cache", "tests/unit/scheduler")
NUM_SEEDS = 24
NUM_QUICK = 6
"""So many seeds come before the unit tests: they notice most faults soonest."""
MOST_STEPS = 1000
"""A request that a fault keeps waiting for ever is given up sooner here."""


def detect() -> str | None:
    """What was noticed, if anything."""
    return try_seeds(0, NUM_QUICK) or try_unit_tests() or try_seeds(NUM_QUICK, NUM_SEEDS)


def try_seeds(first: int, end: int) -> str | None:
    for seed in range(first, end):
        try:
            Walk.of(seed, 120).run()
            run(seed, num_requests=12)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def try_unit_tests() -> str | None:
    options = ["-x", "-q", "--no-header", "--assert=plain", "-p", "no:cacheprovider"]
    return None if pytest.main([*options, *UNIT_TESTS]) == 0 else "a unit test"


if __name__ == "__main__":
    here = Path(manyroots.__file__).parents[1]
    assert here == Path.cwd(), f"tests the package in {here}"
    logging.disable()
    Deciding.run.__defaults__ = (MOST_STEPS,)
    noticed = detect()
    print(f"noticed: {noticed}")
    sys.exit(int(noticed is not None))
