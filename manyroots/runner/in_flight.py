"""Launched steps whose tokens are being copied to the host.

Tokens are counted when their step is launched and known when it is done. In between their place in
the persistent batch holds PENDING, which the device replaces by what it has. On a CPU a step is
done when it is launched, and nothing is ever on the way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from manyroots.kernels.decode_rows.reference import PENDING
from manyroots.kernels.sampling.rows import Sampled
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import Int64s
from manyroots.step import Int32s, Plan


class InFlight:
    """What one step sampled, and for which rows. The copy is queued after the step; a call for
    the tokens waits for it. Any thread may ask."""

    def __init__(self, rows: Int32s, sampled: Sampled, at: Int64s) -> None:
        """`at`: where each of `rows` is in `sampled`, which is read on the current stream, before
        whatever is launched there next."""
        self.rows = rows
        self.at = at
        self._event: torch.cuda.Event | None = None
        self._host = sampled
        packed = sampled.packed
        if packed.device.type == "cuda":
            self._host = replace(
                sampled, packed=torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            )
            self._host.packed.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has none here
            self._event.record()
        # Views, made now: after a step with guesses the device waits for the host.
        self._tokens, self._faults = self._host.tokens.numpy(), self._host.faults.numpy()

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Sampled:
        """What was sampled, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @cached_property
    def tokens(self) -> Int32s:
        """Those of `rows`; waits for the step."""
        self.wait()
        tokens: Int32s = self._tokens[self.at]
        return tokens

    @cached_property
    def faults(self) -> Int32s:
        """The reason that a row has no token, or NO_FAULT; waits for the step."""
        self.wait()
        faults: Int32s = self._faults[self.at]
        return faults


@dataclass(frozen=True, slots=True)
class _Expected:
    """Where a launched step's tokens belong, if the rows are still the same sequences'."""

    step: InFlight
    picks: Int64s
    """Which of the step's samples."""
    places: Int64s
    owners: Int64s


class PendingTokens:
    """Keeps a `PersistentBatch` up to date with steps that run later. Only the launching
    thread uses it."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch
        self._owner = np.zeros(len(batch.num_tokens), np.int64)
        """Counts the sequences that each row has had."""
        self._expected: deque[_Expected] = deque()

    def apply(self, plan: Plan) -> None:
        """Take in that rows have new owners."""
        for arrival in plan.arrivals:
            self._owner[arrival.row] += 1

    def expect(self, step: InFlight, picks: Int64s) -> None:
        """Tokens of these of its samples are counted from now on: one for each of their rows."""
        if len(picks) == 0:
            return
        rows = step.rows[picks]
        places = self._batch.append(rows, PENDING)
        self._expected.append(_Expected(step, picks, places, self._owner[rows]))

    def learn(self, *, all_of_them: bool = False) -> None:
        """Fill in the tokens of steps that are done; or wait until all are."""
        while self._expected and (all_of_them or self._expected[0].step.is_done):
            expected = self._expected.popleft()
            picks, places = expected.picks, expected.places
            tokens, rows = expected.step.tokens[picks], expected.step.rows[picks]
            same = self._owner[rows] == expected.owners
            if not same.all():
                tokens, rows, places = tokens[same], rows[same], places[same]
            self._batch.tokens[rows, places] = tokens
