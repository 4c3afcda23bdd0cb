"""Whether a prompt is answered sooner because another party has sent it, by the clock.

Rounds of three timed requests, in random order, each right after one of the other party: a fresh
prompt, one that the other party has just sent, and one that the party itself has sent before. The
three are compared in pairs within their round, so that a machine's slow minutes cancel out, by an
exact sign test, in which a request that took ten times as long counts as one. A verdict needs:

- power: own prompts are faster than fresh ones, or times can't show anything here;
- for a leak: crossed prompts are faster than fresh ones, by a quarter of what own ones gain;
- for none: own prompts are faster than crossed ones, which gain less than a quarter.

Anything else is "not judged". There are at most three looks at the data, which share the error
rate: a server without a leak is accused in one of a thousand runs at most, for each pair.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manyroots.conformance.report import Finding, Verdict, not_judged

NUM_LOOKS = 3
ERROR_RATE = 1e-3
_GAIN_SHARE = 0.25
MIN_ROUNDS = 12
"""With fewer, not even equal signs in all rounds are below the error rate of one look."""


@dataclass(slots=True)
class RoundTimes:
    """Seconds of the timed requests, round by round."""

    fresh: list[float] = field(default_factory=list)
    crossed: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    @property
    def figures(self) -> str:
        medians = (1e3 * statistics.median(each) for each in (self.fresh, self.crossed, self.own))
        fresh, crossed, own = medians
        return (
            f"medians of {len(self.fresh)} rounds in ms: fresh {fresh:.1f}, "
            f"crossed {crossed:.1f}, own {own:.1f}"
        )


def judge_times(measure: Callable[[str], float], num_rounds: int, rng: random.Random) -> Finding:
    """`measure` takes `fresh`, `crossed` or `own` and gives the seconds of one such request."""
    times = RoundTimes()
    finding = None
    for _ in range(NUM_LOOKS):
        for _ in range(num_rounds):
            kinds = ["fresh", "crossed", "own"]
            rng.shuffle(kinds)
            for kind in kinds:
                getattr(times, kind).append(measure(kind))
        finding = verdict_of(times)
        if finding.verdict is not Verdict.NOT_JUDGED:
            break
    assert finding is not None
    return finding


def verdict_of(times: RoundTimes) -> Finding:
    """One look."""
    limit = ERROR_RATE / NUM_LOOKS

    def is_faster(one: Sequence[float], other: Sequence[float]) -> bool:
        gains = [b - a for a, b in zip(one, other, strict=True)]
        return sign_p(gains) < limit

    def gain(kind: Sequence[float]) -> float:
        pairs = zip(kind, times.fresh, strict=True)
        return statistics.median(fresh - seconds for seconds, fresh in pairs)

    if not is_faster(times.own, times.fresh):
        return not_judged(f"a hit is no faster than a miss here ({times.figures})", "times")
    is_large = gain(times.crossed) >= _GAIN_SHARE * gain(times.own)
    if is_large and is_faster(times.crossed, times.fresh):
        return Finding("times", Verdict.LEAK, times.figures)
    if not is_large and is_faster(times.own, times.crossed):
        return Finding("times", Verdict.APART, times.figures)
    return not_judged(f"too noisy ({times.figures})", "times")


def sign_p(differences: Sequence[float]) -> float:
    """The chance of as many positive differences if either sign were as likely as the other, for
    each (the sign test, one-sided and exact). Equal times count for neither."""
    kept = [value > 0 for value in differences if value]
    choices = (math.comb(len(kept), count) for count in range(sum(kept), len(kept) + 1))
    return sum(choices) / float(2 ** len(kept))
