"""Things that go wrong, decided by a seed.

Takes rates, gives answers to "does this one fail?". Each answer depends on the seed, the kind of
fault and the number of the thing asked about, never on what was asked before: a run replays
exactly, and one more kind of fault leaves the others where they were.

A host without room needs no fault of its own: a small one is full most of the time.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from dataclasses import dataclass

from manyroots.errors import ConfigError
from manyroots.ids import RequestId, StepId
from manyroots.simulate.traffic import TraceSequence

STEPS_BETWEEN_FAILURES = 8
"""A failed step takes the next one with it, and a loop that sees three failures without a good
step between them takes its runner for dead: that is another test than this one."""

SLOW_FACTOR = 20.0
"""A slow transfer takes this many times as long."""


class TransferFault(enum.Enum):
    """What becomes of a copy between tiers, or of an adapter's load."""

    NONE = "none"
    FAILED = "failed"
    """Acknowledged as failed."""
    SLOW = "slow"
    LOST = "lost"
    """No word of it for a long time, then acknowledged as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each thing goes wrong: chances from 0 to 1."""

    failed_steps: float = 0.0
    aborts: float = 0.0
    """Of a sequence: its caller leaves at some point before or after it ends."""
    bursts: float = 0.0
    """Of a line of the trace: it comes together with the one before it."""
    failed_transfers: float = 0.0
    """Of a copy between tiers, and of an adapter's load; so are the next two."""
    slow_transfers: float = 0.0
    lost_transfers: float = 0.0
    dead_storage: float = 0.0
    """Of a run: storage stops answering at some point."""
    adapter_reloads: float = 0.0
    """Of a sequence: its adapter is unloaded, and loaded again, about while it runs."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            chance = getattr(self, spec.name)
            if not 0.0 <= chance <= 1.0:
                raise ConfigError(f"{spec.name} is {chance}; a chance is from 0 to 1.")


NO_FAULTS = Faults()


class FaultSource:
    """Answers for one run."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._seed = seed
        self._last_failed_step = -STEPS_BETWEEN_FAILURES
        self._has_transfer_faults = bool(
            faults.failed_transfers or faults.slow_transfers or faults.lost_transfers
        )

    def step_fails(self, step_id: StepId) -> bool:
        """Asked in the order of the steps."""
        if step_id - self._last_failed_step < STEPS_BETWEEN_FAILURES:
            return False
        if not self._happens("step", step_id, self._faults.failed_steps):
            return False
        self._last_failed_step = step_id
        return True

    def abort_after(self, sequence: TraceSequence) -> int | None:
        """After how many rounds of the loop the caller leaves; None stays to the end.

        Up to somewhat more than the reply's length: in the queue, between two chunks of the
        prompt, while decoding, at the very end and too late are all reached.
        """
        if not self._happens("abort", sequence.request_id, self._faults.aborts):
            return None
        rng = self._rng("abort after", sequence.request_id)
        return rng.randint(0, sequence.line.output_tokens + 6)

    def joins_previous(self, request_id: RequestId) -> bool:
        return self._happens("burst", request_id, self._faults.bursts)

    def transfer(self, number: int) -> TransferFault:
        return self._transfer_fault("transfer", number)

    def load(self, number: int) -> TransferFault:
        return self._transfer_fault("load", number)

    def _transfer_fault(self, kind: str, number: int) -> TransferFault:
        if not self._has_transfer_faults:
            return TransferFault.NONE
        draw = self._rng(kind, number).random()
        for fault, chance in (
            (TransferFault.FAILED, self._faults.failed_transfers),
            (TransferFault.SLOW, self._faults.slow_transfers),
            (TransferFault.LOST, self._faults.lost_transfers),
        ):
            if draw < chance:
                return fault
            draw -= chance
        return TransferFault.NONE

    def storage_is_dead(self, step_id: StepId) -> bool:
        """From some step on, for good."""
        if not self._happens("storage", 0, self._faults.dead_storage):
            return False
        return step_id >= self._rng("storage since", 0).randint(1, 100)

    def reload_after(self, sequence: TraceSequence) -> tuple[int, int] | None:
        """After how many rounds of the loop its adapter is unloaded, and how many rounds later it
        is loaded again; None leaves it alone."""
        if not self._happens("adapter", sequence.request_id, self._faults.adapter_reloads):
            return None
        rng = self._rng("adapter after", sequence.request_id)
        return rng.randint(0, sequence.line.output_tokens + 6), rng.choice([0, 0, 1, 3])

    def new_content(self, request_id: RequestId) -> int:
        """Which of a few contents an adapter that is loaded again has."""
        return self._rng("adapter content", request_id).randrange(3)

    def _happens(self, kind: str, number: int, chance: float) -> bool:
        return chance > 0.0 and self._rng(kind, number).random() < chance

    def _rng(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{kind}/{number}")
