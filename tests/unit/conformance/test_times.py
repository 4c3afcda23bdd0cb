"""The clock's verdict: exact, and silent where chance could say the same."""

from __future__ import annotations

import random

import pytest

from manyroots.conformance.report import Verdict
from manyroots.conformance.times import (
    MIN_ROUNDS,
    RoundTimes,
    judge_times,
    sign_p,
    verdict_of,
)


@pytest.mark.parametrize(
    ("differences", "num_as_high", "num_choices"),
    [
        ([1.0, 2.0, 3.0], 1, 8),
        ([-9.0, 2.0, 3.0, 4.0], 5, 16),
        ([1.0, -1.0, 0.0], 3, 4),
        ([-3.0, -2.0], 4, 4),
        ([], 1, 1),
    ],
)
def test_the_sign_test_counts_every_choice_of_signs(
    differences: list[float], num_as_high: int, num_choices: int
) -> None:
    assert sign_p(differences) == num_as_high / num_choices


def drawn(rng: random.Random, fresh: float, crossed: float, own: float, noise: float) -> RoundTimes:
    """Rounds of a machine with slow minutes and, now and then, a very slow request."""
    times = RoundTimes()
    for _ in range(2 * MIN_ROUNDS):
        slow = rng.uniform(1, 2)
        for kind, seconds in (("fresh", fresh), ("crossed", crossed), ("own", own)):
            hiccup = 10 * rng.random() if rng.random() < 0.05 else 0
            getattr(times, kind).append(slow * (seconds + noise * rng.random()) + hiccup)
    return times


@pytest.mark.parametrize(
    ("crossed", "own", "noise", "expected"),
    [
        (1.0, 0.2, 0.1, Verdict.APART),
        (0.2, 0.2, 0.1, Verdict.LEAK),
        (0.6, 0.2, 0.1, Verdict.LEAK),
        (1.0, 1.0, 0.1, Verdict.NOT_JUDGED),
        (1.0, 0.99, 3.0, Verdict.NOT_JUDGED),
    ],
)
def test_verdicts_by_the_clock(crossed: float, own: float, noise: float, expected: Verdict) -> None:
    """A leak that saves half, none, a cache that saves nothing, and a machine that is too noisy."""
    times = drawn(random.Random(1), 1.0, crossed, own, noise)
    assert verdict_of(times).verdict is expected


def test_chance_accuses_no_server() -> None:
    """A thousand servers without a leak, half of them on machines as noisy as a hit is fast."""
    found = [
        verdict_of(drawn(random.Random(seed), 1.0, 1.0, 0.5, 0.5 * (seed % 2))).verdict
        for seed in range(1000)
    ]
    assert Verdict.LEAK not in found
    assert found.count(Verdict.APART) > 900


def test_a_judgement_ends_with_the_first_look_that_suffices() -> None:
    asked: list[str] = []

    def measure(kind: str) -> float:
        asked.append(kind)
        return {"fresh": 1.0, "crossed": 1.01, "own": 0.1}[kind] + 1e-3 * len(asked)

    assert judge_times(measure, MIN_ROUNDS, random.Random(0)).verdict is Verdict.APART
    assert len(asked) == 3 * MIN_ROUNDS
    finding = judge_times(lambda kind: 1.0, MIN_ROUNDS, random.Random(0))
    assert finding.verdict is Verdict.NOT_JUDGED
