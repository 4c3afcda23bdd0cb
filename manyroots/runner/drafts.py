"""Guessed tokens of a step: where they are sampled, how many are right, and what is taken back.

A row with a draft samples after its newest token and after each guess. Guesses are right while
they equal what was sampled before them. The count is not known when the step is launched, so the
row's progress is settled before the next plan is taken in; the scheduler waits for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from manyroots.ids import Row
from manyroots.kernels.sampling.rows import NO_FAULT
from manyroots.runner.batch import PersistentBatch
from manyroots.runner.in_flight import InFlight
from manyroots.runner.inputs import Int64s, StepInputs
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Int32s, Plan
from manyroots.store.arena import UnitArena


class CheckedDraft(NamedTuple):
    """One row's guesses, and which samples of its step check them."""

    row: int
    tokens: Int32s
    samples: list[int]
    """Indices into the step's samples: after the newest token, then after each guess."""


def checked_drafts(plan: Plan, inputs: StepInputs) -> tuple[CheckedDraft, ...]:
    """The drafts of a plan, in the step's layout."""
    if not plan.drafts:
        return ()
    samples: dict[int, list[tuple[int, int]]] = {draft.row: [] for draft in plan.drafts}
    rows = inputs.rows[inputs.sampling].tolist()
    for sample, (row, place) in enumerate(zip(rows, inputs.guesses.tolist(), strict=True)):
        if row in samples:
            samples[row].append((place, sample))
    return tuple(
        CheckedDraft(int(draft.row), draft.tokens, [at for _, at in sorted(samples[draft.row])])
        for draft in plan.drafts
    )


class DraftCheck:
    """A launched step and the drafts that it checks. Any thread may ask."""

    def __init__(self, step: InFlight, drafts: tuple[CheckedDraft, ...]) -> None:
        self.step, self.drafts = step, drafts
        self._guesses = [draft.tokens.tolist() for draft in drafts]

    @cached_property
    def num_right(self) -> dict[Row, int]:
        """How many guesses of each row are right; waits for the step.

        A position without a token (logits that are not finite, a grammar that can't go on) ends
        the draft before it. It is computed again alone, and fails as it would have without a draft.
        """
        if not self.drafts:
            return {}
        # Lists: this is between two steps, and numpy takes longer for so few numbers.
        tokens, faults = self.step.tokens.tolist(), self.step.faults.tolist()
        counts = {}
        for draft, guesses in zip(self.drafts, self._guesses, strict=True):
            count = 0
            for guess, before, after in zip(
                guesses, draft.samples, draft.samples[1:], strict=False
            ):
                if tokens[before] != guess or faults[after] != NO_FAULT:
                    break
                count += 1
            counts[Row(draft.row)] = count
        return counts

    def newest(self, firsts: Int64s) -> Int64s:
        """Of rows with these first samples, the sample of the newest token; waits for the step."""
        if not self.drafts:
            return firsts
        after = np.arange(len(self.step.rows))
        after[[draft.samples[0] for draft in self.drafts]] = self.last_samples
        return after[firsts]

    @cached_property
    def last_samples(self) -> list[int]:
        """Of each draft, the sample of the token after the last right guess; waits for the step."""
        right = self.num_right
        return [draft.samples[right[Row(draft.row)]] for draft in self.drafts]


class DraftRows:
    """Settles rows whose guesses a launched step checks. Used by the thread that launches."""

    def __init__(
        self, batch: PersistentBatch, state: SamplingState, states: Sequence[UnitArena]
    ) -> None:
        """`states`: the arenas of families of states."""
        self._batch = batch
        self._state = state
        self._states = states
        self._saved: list[Tensor] = []
        """By family of states: what rows with a draft had before the step."""
        self._unsettled: DraftCheck | None = None

    def save_states(self, drafts: Sequence[CheckedDraft]) -> None:
        """To be called before the model computes: it changes the states of these rows."""
        self._saved = [
            arena.data.index_select(0, self._units(drafts, family))
            for family, arena in enumerate(self._states)
        ]

    def _units(self, drafts: Sequence[CheckedDraft], family: int) -> Tensor:
        units = self._batch.units[family, [draft.row for draft in drafts]].astype(np.int64)
        return torch.from_numpy(units).to(self._states[family].data.device)

    def expect(self, check: DraftCheck) -> None:
        """A step was launched that checks drafts."""
        self._unsettled = check

    def settle(self) -> None:
        """Wait for the newest step if it checks guesses, and take what is right of them."""
        if self._unsettled is None:
            return
        check, self._unsettled = self._unsettled, None
        drafts, num_right = check.drafts, check.num_right
        rows, counts = np.array([*num_right], np.int64), np.array([*num_right.values()], np.int64)
        sampled = check.step.tokens
        self._batch.accept(rows, counts, sampled[check.last_samples])
        after_guesses = {}
        for place, draft in enumerate(drafts):
            count = num_right[Row(draft.row)]
            if self._states and count < len(draft.tokens):
                for family, arena in enumerate(self._states):
                    unit = self._units([draft], family)
                    arena.data.index_copy_(0, unit, self._saved[family][place : place + 1])
                self._batch.go_back(draft.row, count)
            if self._state.counts_tokens(draft.row):
                after_guesses[draft.row] = sampled[draft.samples[1 : count + 1]]
        self._state.count(after_guesses)
