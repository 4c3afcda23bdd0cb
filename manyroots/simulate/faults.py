"""Things that go wrong, decided by a seed.

Takes rates, gives answers to "does this one fail?". Each answer depends on the seed, the kind of
fault and the number of the thing asked about, never on what was asked before: a run replays
exactly, and one more kind of fault leaves the others where they were.

Transfers and adapters are asked about by nobody yet: the simulated cache has one tier, and no
adapter is loaded. `transfer`, `host_is_full`, `storage_is_dead` and `reload_adapter` are the seam;
`ModelledRunner.launch` says where copies join in.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from dataclasses import dataclass

from manyroots.errors import ConfigError
from manyroots.ids import RequestId, StepId
from manyroots.simulate.traffic import Sequence

STEPS_BETWEEN_FAILURES = 8
"""A failed step takes the next one with it, and a loop that sees three failures without a good
step between them takes its runner for dead: that is another test than this one."""

SLOW_FACTOR = 20.0
"""A slow transfer takes this many times as long."""


class TransferFault(enum.Enum):
    """What becomes of a copy between tiers."""

    NONE = "none"
    FAILED = "failed"
    """Acknowledged as failed."""
    SLOW = "slow"
    LOST = "lost"
    """Never acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each thing goes wrong: chances from 0 to 1."""

    failed_steps: float = 0.0
    aborts: float = 0.0
    """Of a sequence: its caller leaves at some point before or after it ends."""
    bursts: float = 0.0
    """Of a line of the trace: it comes together with the one before it."""
    failed_transfers: float = 0.0
    slow_transfers: float = 0.0
    lost_transfers: float = 0.0
    full_host: float = 0.0
    """Of a step: no host page can be had while it is planned."""
    dead_storage: float = 0.0
    """Of a run: storage stops answering at some point."""
    adapter_reloads: float = 0.0
    """Of a sequence: its adapter is unloaded, and loaded again, while it runs."""

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

    def step_fails(self, step_id: StepId) -> bool:
        """Asked in the order of the steps."""
        if step_id - self._last_failed_step < STEPS_BETWEEN_FAILURES:
            return False
        if not self._happens("step", step_id, self._faults.failed_steps):
            return False
        self._last_failed_step = step_id
        return True

    def abort_after(self, sequence: Sequence) -> int | None:
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
        draw = self._rng("transfer", number).random()
        for fault, chance in (
            (TransferFault.FAILED, self._faults.failed_transfers),
            (TransferFault.SLOW, self._faults.slow_transfers),
            (TransferFault.LOST, self._faults.lost_transfers),
        ):
            if draw < chance:
                return fault
            draw -= chance
        return TransferFault.NONE

    def host_is_full(self, step_id: StepId) -> bool:
        return self._happens("host", step_id, self._faults.full_host)

    def storage_is_dead(self, step_id: StepId) -> bool:
        """From some step on, for good."""
        if not self._happens("storage", 0, self._faults.dead_storage):
            return False
        return step_id >= self._rng("storage since", 0).randint(1, 100)

    def reload_adapter(self, request_id: RequestId) -> bool:
        return self._happens("adapter", request_id, self._faults.adapter_reloads)

    def _happens(self, kind: str, number: int, chance: float) -> bool:
        return chance > 0.0 and self._rng(kind, number).random() < chance

    def _rng(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{kind}/{number}")
