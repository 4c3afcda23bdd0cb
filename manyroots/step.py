"""The contract between the two halves: a frozen `Plan` goes down, a `StepResult` comes up.

The decide half (scheduler, cache) makes plans without ever touching a tensor; the execute half
(runner) carries them out in order and knows nothing of queues or reuse. The runner keeps a
persistent batch: a sequence arrives once, on a row, and later plans say only what changed.

Within one step a runner writes the keys and values of *all* rows before any row attends, layer
by layer. A plan may therefore let one row read pages that another row fills in the same step.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from manyroots.ids import RequestId, Row, StepId
from manyroots.sampling import SamplingParams

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence takes a row of the persistent batch, replacing whatever was there."""

    row: Row
    request_id: RequestId
    tokens: Int32s
    """Every token known so far: the prompt, and after a retraction the output too."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many of `tokens` already have their keys and values in the pages below."""
    page_tables: tuple[Int32s, ...]
    """One table per cache family, in the order of the engine's family list."""
    sampling: SamplingParams
    seed: int
    """Draw number i of this sequence depends on (seed, i) alone."""
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence; not sampled before `sampling.min_tokens`."""


@dataclass(frozen=True, slots=True)
class NewPages:
    """Pages that continue a row's table of one family, from entry `first`."""

    row: Row
    family: int
    first: int
    pages: Int32s


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass: who arrives, which tables grow, how many tokens each row computes."""

    step_id: StepId
    arrivals: tuple[Arrival, ...]
    new_pages: tuple[NewPages, ...]
    rows: Int32s
    """Rows that compute in this step, each at most once."""
    num_tokens: Int32s
    """For each of `rows`, how many tokens it computes next."""
    samples: Bools
    """For each of `rows`, whether its last computed position yields a new token."""

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, then the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    """1 is the likeliest token."""
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowFault:
    """One row whose computation gave nothing usable; the other rows of the step are good."""

    row: Row
    reason: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave."""

    step_id: StepId
    tokens: Int32s
    """One token per sampling row, in the order of the plan."""
    logprobs: dict[Row, TokenLogprobs] = field(default_factory=dict)
    """For sampling rows that asked for them."""
    prompt_logprobs: dict[Row, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For rows that asked: positions this step computed, each scoring the *next* prompt token."""
    faults: tuple[RowFault, ...] = ()


class Runner(Protocol):
    """Carries out plans, in the order they are launched."""

    def launch(self, plan: Plan) -> Future[StepResult]:
        """Queue a plan behind those already launched; returns at once."""
        ...

    def close(self) -> None:
        """Wait for what was launched, then give everything back."""
        ...
