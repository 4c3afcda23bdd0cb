"""Guessed tokens of a step: where they are sampled, how many are right, and what is taken back.

A row with a draft samples behind its newest token and behind each guess. Guesses are right while
they equal what was sampled before them. The count is not known when the step is launched, so the
row's progress is settled before the next plan is taken in; the scheduler waits for the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyroots.kernels.sampling.rows import NO_FAULT, Sampled
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.in_flight import InFlight
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Int32s, Plan


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """One row's guesses, and which samples of its step check them."""

    row: int
    tokens: Int32s
    samples: Int64s
    """Indices into the step's samples: behind the newest token, then behind each guess."""

    def num_right(self, sampled: Sampled, at: Int64s) -> int:
        """How many guesses are right. `at`: where each of the step's samples is in `sampled`.

        A position without a token (logits that are not finite, a grammar that can't go on) ends the
        draft before it. It is computed again alone, and fails as it would have without a draft.
        """
        places = at[self.samples]
        wrong = np.flatnonzero(sampled.tokens.numpy()[places[:-1]] != self.tokens)
        count = int(wrong[0]) if len(wrong) else len(self.tokens)
        faults = np.flatnonzero(sampled.faults.numpy()[places[1 : count + 1]] != NO_FAULT)
        return int(faults[0]) if len(faults) else count


def checked_drafts(plan: Plan, inputs: StepInputs) -> tuple[CheckedDraft, ...]:
    """The drafts of a plan, in the step's layout."""
    if not plan.drafts:
        return ()
    rows = inputs.rows[inputs.sampling]
    checked = []
    for draft in plan.drafts:
        samples = np.flatnonzero(rows == draft.row)
        samples = samples[np.argsort(inputs.guesses[samples])]
        checked.append(CheckedDraft(int(draft.row), draft.tokens, samples))
    return tuple(checked)


class DraftRows:
    """Settles rows whose guesses a launched step checks. Used by the thread that launches."""

    def __init__(self, batch: PersistentBatch, state: SamplingState) -> None:
        self._batch = batch
        self._state = state
        self._unsettled: tuple[InFlight, tuple[CheckedDraft, ...]] | None = None

    def expect(self, step: InFlight, drafts: tuple[CheckedDraft, ...]) -> None:
        """A step was launched that checks these."""
        self._unsettled = (step, drafts)

    def settle(self) -> None:
        """Wait for the newest step if it checks guesses, and take what is right of them."""
        if self._unsettled is None:
            return
        (step, drafts), self._unsettled = self._unsettled, None
        sampled = step.wait()
        for draft in drafts:
            num_right = draft.num_right(sampled, step.at)
            places = step.at[draft.samples[: num_right + 1]]
            tokens = sampled.tokens.numpy()[places]
            self._batch.accept(draft.row, tokens)
            self._state.count(draft.row, tokens[1:])
