"""The workload of `bench scheduler`, and what a scheduler must offer to be driven through it.

Ours and each peer are driven by the same cases (`scheduler_cases.py`) on the same prompts; only
the hands that call them differ. Imports nothing of the engine, so that a peer's process does not
load what it does not measure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

clock = time.thread_time
"""CPU time of this thread: fair on a machine that is busy with other work."""

VOCAB_SIZE = 150_000
MADE_UP_TOKEN = 7


@dataclass(frozen=True, slots=True)
class SchedulerWorkload:
    """What is run. Crosses to the measuring processes as JSON."""

    num_requests: int
    prompt_len: int
    shared: float
    """Share of each prompt that it has in common with its group."""
    groups: int
    output_len: int
    budget: int
    """Tokens per step."""
    batch: int
    """Sequences per step."""
    burst: int
    """Requests of the burst, which all share one head."""
    decode_batches: tuple[int, ...]
    waiting: tuple[int, ...]
    """How many requests wait while a full batch decodes; ascending."""
    steady_steps: int
    """Steps per steady-state figure."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SchedulerWorkload:
        """What `asdict` gave, after JSON made lists of its tuples."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)

    def shared_len(self, page_size: int) -> int:
        """Tokens of a head, in whole pages, as only those can be shared."""
        return int(self.prompt_len * self.shared) // page_size * page_size

    def prompts(self, count: int, groups: int, page_size: int) -> list[list[int]]:
        """`groups` heads taken in turn, each followed by a private tail."""
        rng = np.random.default_rng(0)
        head_len = self.shared_len(page_size)
        heads = rng.integers(1, VOCAB_SIZE, (groups, head_len)).tolist()
        tails = rng.integers(1, VOCAB_SIZE, (count, self.prompt_len - head_len)).tolist()
        return [heads[i % groups] + tail for i, tail in enumerate(tails)]

    def best_hit_rate(self, count: int, groups: int, page_size: int) -> float:
        """Every request but the first of each group finds its head."""
        num_hits = max(0, count - groups)
        return num_hits * self.shared_len(page_size) / (count * self.prompt_len)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a scheduler is built for."""

    page_size: int
    num_pages: int
    max_model_len: int
    budget: int
    batch: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: what it held and what it cost. Reading the plan and answering it is neither."""

    plan_s: float
    advance_s: float
    num_rows: int
    num_arrivals: int
    has_prefill: bool
    num_hit_tokens: int
    """Prompt tokens that the requests arriving in this step need not compute."""


class DrivenScheduler(Protocol):
    """A scheduler without a model: each plan is answered at once."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, prompts: list[list[int]], output_len: int) -> float:
        """Queue requests; the seconds that this took, without preparing them."""
        ...

    def step(self) -> StepTimes:
        """Plan, answer every sampling row with a made-up token, advance."""
        ...
