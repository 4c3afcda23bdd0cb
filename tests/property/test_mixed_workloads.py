"""Everything at once, each request against itself alone: a slice of
`tests.soaks.mixed_workloads`."""

from __future__ import annotations

from tests.soaks.mixed_workloads import run_seed

SEED, NUM_EVENTS, NUM_ANSWERS = 3026, 10, 12
"""Without storage: its answers take their time."""


def test_h13_whatever_happens_beside_it_a_request_gets_its_own_answer() -> None:
    """H13: adapters, tiers, weights, aborts and faults; nothing is left in the end."""
    counts, failure = run_seed(SEED, NUM_EVENTS, NUM_ANSWERS)
    assert failure is None, failure
    assert counts["compared"] >= NUM_ANSWERS
