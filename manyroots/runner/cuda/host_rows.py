"""The host's side of the rows: the persistent batch, whose newest tokens may still be on the way.

Tokens are counted when their step is launched and known when it is done. In between their place
holds PENDING, which the device replaces by what it has. Used by the thread that launches, alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from manyroots.kernels.decode_rows.reference import PENDING
from manyroots.runner.batch import Int64s, PersistentBatch
from manyroots.runner.cuda.in_flight import InFlight
from manyroots.step import Plan


@dataclass(frozen=True, slots=True)
class _Expected:
    """Where a launched step's tokens belong, if the rows are still the same sequences'."""

    step: InFlight
    places: Int64s
    owners: Int64s


class HostRows:
    """Keeps a `PersistentBatch` up to date with steps that run behind it."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch
        self._owner = np.zeros(len(batch.num_tokens), np.int64)
        """Counts the sequences that each row has had."""
        self._expected: deque[_Expected] = deque()

    def apply(self, plan: Plan) -> None:
        """Take in a plan's arrivals and tables."""
        self._batch.apply(plan)
        for arrival in plan.arrivals:
            self._owner[arrival.row] += 1

    def expect(self, step: InFlight) -> None:
        """Its tokens are counted from now on."""
        rows = step.rows
        places = self._batch.num_tokens[rows]
        self._expected.append(_Expected(step, places, self._owner[rows]))
        self._batch.append(rows, np.full(len(rows), PENDING, np.int32))

    def learn(self, *, wait: bool = False) -> None:
        """Fill in the tokens of steps that are done; with `wait`, of all."""
        while self._expected and (wait or self._expected[0].step.is_done):
            expected = self._expected.popleft()
            tokens, _ = expected.step.wait()
            rows = expected.step.rows
            same = self._owner[rows] == expected.owners
            self._batch.tokens[rows[same], expected.places[same]] = tokens[same]
