"""A small random engine with random faulty traffic, decided by a seed alone.

Small numbers meet more corners per second: pools that hold little more than the longest request,
pages of 1 to 8 tokens, prompts that part in the middle of a page, replies that several requests
share, a budget below one prompt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from manyroots.simulate.costs import CostModel
from manyroots.simulate.faults import Faults
from manyroots.simulate.presets import ROUND_NUMBERS
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.trace import EndsBy, Segment, Trace, TraceRequest

LONGEST_HEAD, LONGEST_TAIL, LONGEST_REPLY = 20, 8, 24
LONGEST = LONGEST_HEAD + LONGEST_TAIL + LONGEST_REPLY


@dataclass(frozen=True, slots=True)
class Case:
    """All that `simulate` takes."""

    seed: int
    trace: Trace
    settings: SimulationSettings
    costs: CostModel
    faults: Faults


def random_case(seed: int) -> Case:
    rng = random.Random(f"case {seed}")
    return Case(
        seed=seed,
        trace=_trace(rng, num_requests=rng.randint(2, 18)),
        settings=_settings(rng),
        costs=ROUND_NUMBERS.costs,
        faults=_faults(rng),
    )


def _settings(rng: random.Random) -> SimulationSettings:
    page_size = rng.choice([1, 2, 4, 8])
    fewest = -(-LONGEST // page_size)
    max_num_seqs = rng.randint(1, 8)
    return SimulationSettings(
        block_size=page_size,
        num_pages=rng.randint(fewest, rng.choice([1, 2, 3]) * fewest),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, 8, 17, 64]),
        long_prefill_token_threshold=rng.choice([None, 1, 3, 8]),
        enable_prefix_caching=rng.random() < 0.9,
        depth=rng.choice([0, 1, 1]),
    )


def _faults(rng: random.Random) -> Faults:
    return Faults(
        failed_steps=rng.choice([0.0, 0.0, 0.02, 0.1]),
        aborts=rng.choice([0.0, 0.1, 0.4]),
        bursts=rng.choice([0.0, 0.3, 0.9]),
    )


def _trace(rng: random.Random, *, num_requests: int) -> Trace:
    heads = [f"head {rng.random()}" for _ in range(rng.randint(1, 4))]
    arrival_s = 0.0
    lines = []
    # From a trickle, one request at a time, to a queue that only grows.
    pause_s = rng.choice([0.005, 0.05, 0.2])
    for number in range(num_requests):
        arrival_s += rng.expovariate(1 / pause_s)
        lines.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt=_prompt(rng, rng.choice(heads)),
                adapter=rng.choice([None, None, "a", "b"]),
                salt=rng.choice([None, None, None, ""]),
                output_tokens=rng.randint(1, LONGEST_REPLY),
                n=rng.choice([1, 1, 1, 1, 3]),
                reply=rng.choice([None, "shared", f"own {number}"]),
                ends_by=rng.choice(list(EndsBy)),
            )
        )
    return tuple(lines)


def _prompt(rng: random.Random, head: str) -> tuple[Segment, ...]:
    parts = [Segment(head, rng.randint(1, LONGEST_HEAD))]
    # Two letters, so that tails are often alike for a while.
    parts += [Segment(rng.choice("xy"), 1) for _ in range(rng.randint(0, LONGEST_TAIL))]
    return tuple(parts)
