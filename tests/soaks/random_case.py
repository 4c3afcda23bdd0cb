"""A small random engine with random faulty traffic, decided by a seed alone.

Small numbers meet more corners per second: pools that hold little more than the longest request,
pages of 1 to 8 tokens, prompts that part in the middle of a page, replies that several requests
share, a budget below one prompt. Every mix of families, with and without lower tiers, every policy;
adapters that are loaded, unloaded and replaced under their requests; copies and loads that fail,
dawdle or get lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import Prefetch, WriteBack
from manyroots.config import Policy
from manyroots.messages import KeepRange, Retention
from manyroots.simulate.costs import CostModel, with_costs
from manyroots.simulate.faults import Faults
from manyroots.simulate.presets import ROUND_NUMBERS
from manyroots.simulate.settings import SimulationSettings
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest, TraceSegment

LONGEST_HEAD, LONGEST_TAIL, LONGEST_REPLY = 14, 6, 40
LONGEST = LONGEST_HEAD + LONGEST_TAIL + LONGEST_REPLY

FULL, NARROW, WIDE, STATE = "full", "narrow", "wide", "state"
MIXES = (
    (FULL,), (FULL,), (NARROW,), (STATE,), (FULL, NARROW), (FULL, STATE), (NARROW, WIDE),
    (FULL, NARROW, WIDE), (FULL, NARROW, STATE),
)  # fmt: skip


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
        costs=_costs(rng),
        faults=_faults(rng),
    )


def _settings(rng: random.Random) -> SimulationSettings:
    page_size = rng.choice([1, 2, 4, 8])
    fewest = -(-LONGEST // page_size)
    max_num_seqs = rng.randint(1, 8)
    max_loras = rng.choice([0, 1, 2])
    has_host = rng.random() < 0.6
    families = tuple(
        _capacity(rng, name, page_size, max_num_seqs, has_host) for name in rng.choice(MIXES)
    )
    return SimulationSettings(
        block_size=page_size,
        # The longest sequence served; each family has room of its own.
        num_pages=fewest,
        families=families,
        write_back=rng.choice(list(WriteBack)).value,
        storage=has_host and rng.random() < 0.4,
        max_loras=max_loras,
        max_cpu_loras=rng.choice([0, 0, max(2, max_loras)]),
        scheduling_policy=rng.choice(list(Policy)).value,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, 8, 17, 64]),
        long_prefill_token_threshold=rng.choice([None, 1, 3, 8]),
        enable_prefix_caching=rng.random() < 0.9,
        depth=rng.choice([0, 1, 1]),
        prefetch=rng.choice(list(Prefetch)).value,
        prefetch_timeout_steps=rng.choice([0, 1, 5]),
        # With a quantum of 64 steps no adapter would pause in so short a run.
        adapter_quantum_steps=rng.choice([1, 4, 64, None]),
        num_spare_slots=rng.choice([0, 0, 1, 2]),
    )


def _capacity(
    rng: random.Random, name: str, page_size: int, max_num_seqs: int, has_host: bool
) -> Capacity:
    num_host = rng.randint(2, 24) if has_host else 0
    if name == STATE:
        family = RecurrentState(name, interval=rng.randint(1, 4))
        return Capacity(family, rng.randint(max_num_seqs + 1, max_num_seqs + 12), num_host)
    fewest = -(-LONGEST // page_size)
    num_device = rng.randint(fewest, rng.choice([1, 1, 2, 3]) * fewest)
    if name == FULL:
        return Capacity(FULL_ATTENTION, num_device, num_host)
    window = rng.randint(1, 9) if name == NARROW else rng.randint(10, 24)
    return Capacity(SlidingWindow(name, window, page_size), num_device, num_host)


def _costs(rng: random.Random) -> CostModel:
    """Copies and loads that end within a step, and ones that outlast many."""
    return with_costs(
        ROUND_NUMBERS.costs,
        {
            "host_latency_s": rng.choice([0.0, 0.001, 0.03]),
            "storage_latency_s": rng.choice([0.0, 0.01, 0.05]),
            "adapter_storage_load_s": rng.choice([0.0, 0.02, 0.2]),
        },
    )


def _faults(rng: random.Random) -> Faults:
    return Faults(
        failed_steps=rng.choice([0.0, 0.0, 0.02, 0.1]),
        aborts=rng.choice([0.0, 0.1, 0.4]),
        bursts=rng.choice([0.0, 0.3, 0.9]),
        failed_transfers=rng.choice([0.0, 0.0, 0.2]),
        slow_transfers=rng.choice([0.0, 0.2]),
        lost_transfers=rng.choice([0.0, 0.0, 0.05]),
        dead_storage=rng.choice([0.0, 0.0, 0.5]),
        adapter_reloads=rng.choice([0.0, 0.0, 0.3]),
    )


def _trace(rng: random.Random, *, num_requests: int) -> Trace:
    heads = [f"head {rng.random()}" for _ in range(rng.randint(1, 4))]
    arrival_s = 0.0
    lines = []
    # From a trickle, one request at a time, to a queue that only grows.
    pause_s = rng.choice([0.005, 0.05, 0.2])
    marks = random.Random(heads[0])  # on its own, so that the rest of a seed stays as it was
    is_marked = marks.random() < 0.4
    for number in range(num_requests):
        arrival_s += rng.expovariate(1 / pause_s)
        lines.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt=_prompt(rng, rng.choice(heads)),
                adapter=rng.choice([None, None, "a", "b", "c"]),
                salt=rng.choice([None, None, None, ""]),
                output_tokens=rng.randint(1, LONGEST_REPLY),
                n=rng.choice([1, 1, 1, 1, 3]),
                reply=rng.choice([None, "shared", f"own {number}"]),
                ends_by=rng.choice(list(EndsBy)),
                retention=_retention(marks) if is_marked else None,
            )
        )
    return tuple(lines)


def _retention(rng: random.Random) -> Retention | None:
    if rng.random() < 0.6:
        return None
    ends = sorted(rng.sample(range(1, LONGEST_HEAD + LONGEST_TAIL), rng.randint(1, 3)))
    ranges = [KeepRange(end, rng.randint(0, 2), rng.choice([0.001, 0.1, 1e6])) for end in ends]
    share = rng.choice([0.1, 0.5, 1.0])
    return Retention(tuple(ranges), rng.choice([None, "a", "b"]), share)


def _prompt(rng: random.Random, head: str) -> tuple[TraceSegment, ...]:
    parts = [TraceSegment(head, rng.randint(1, LONGEST_HEAD))]
    # Two letters, so that tails are often alike for a while.
    parts += [TraceSegment(rng.choice("xy"), 1) for _ in range(rng.randint(0, LONGEST_TAIL))]
    return tuple(parts)
