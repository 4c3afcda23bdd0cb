"""Steps with guesses that are laid out as an earlier one, so that only their positions move.

While the same rows check as many guesses as before, most arrays of a step are those of the earlier
step. Takes a plan and the batch; gives the inputs and arrays of the step, or None if no earlier
step is alike. A step with guesses is launched while the device idles, so its host time counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.drafts import CheckedDraft
from manyroots.runner.inputs import NOWHERE, Int64s, StepInputs
from manyroots.runner.packet import KeptArrays
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.step_arrays import NamedArrays, decode_order
from manyroots.step import Plan

MAX_LAYOUTS = 32
"""Divisions of guesses among rows that are kept."""

LayoutKey = tuple[bytes, bytes, bytes, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """What stays the same from step to step."""

    inputs: StepInputs
    """Of the step that it was made of, with a row for each token."""
    arrays: KeptArrays
    """Of the newest step with this layout, padded. The next one writes what it changes to them."""
    token_rows: Int64s
    """Row of each token, padding included."""
    ahead: Int64s
    """Of each token, how many tokens of its row come before it in the step."""
    sequences: Int64s
    counts: Int64s
    """The rows that compute, and their number of tokens."""
    num_before_output: Int64s
    """Of each sample, the number of tokens before the first output token of its row."""
    draft_samples: tuple[list[int], ...]
    """As in `CheckedDraft`, in the order of the plan's drafts."""

    def drafts(self, plan: Plan) -> tuple[CheckedDraft, ...]:
        """The drafts of a plan that has this layout."""
        return tuple(
            CheckedDraft(draft.row, draft.tokens, samples)
            for draft, samples in zip(plan.drafts, self.draft_samples, strict=True)
        )


class RepeatedSteps:
    """Keeps the layouts of steps with guesses, until a request arrives."""

    def __init__(self, batch: PersistentBatch, state: SamplingState) -> None:
        self._batch, self._state = batch, state
        self._layouts: OrderedDict[LayoutKey, StepLayout] = OrderedDict()

    def apply(self, plan: Plan) -> None:
        """Rows may have other owners from now on."""
        if plan.arrivals:
            self._layouts.clear()

    def find(self, plan: Plan) -> StepLayout | None:
        """The layout of an earlier step that is like this one."""
        key = _key(plan)
        layout = self._layouts.get(key)
        if layout is not None:
            self._layouts.move_to_end(key)
        return layout

    def keep(
        self,
        plan: Plan,
        inputs: StepInputs,
        arrays: NamedArrays,
        drafts: Sequence[CheckedDraft],
    ) -> None:
        """Keep the layout of a step with a row for each token; `arrays` are padded."""
        rows = inputs.rows[inputs.sampling]
        if self._batch.may_change_adapter(inputs.rows) or self._state.changes_with_length(rows):
            return
        token_rows = arrays["token_rows"]
        sequences = plan.rows.astype(np.int64)  # an index of 32 bits takes five times as long
        begin = np.zeros(len(self._batch.num_tokens), np.int64)
        begin[sequences] = self._batch.num_computed(sequences) - plan.num_tokens
        self._layouts[_key(plan)] = StepLayout(
            inputs,
            KeptArrays(arrays),
            token_rows,
            arrays["positions"] - begin[token_rows],
            sequences,
            plan.num_tokens.astype(np.int64),
            self._batch.num_prompt_tokens[rows],
            tuple(draft.samples for draft in drafts),
        )
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)

    def step(self, layout: StepLayout) -> StepInputs:
        """The inputs of the next such step, whose padded arrays are then the layout's; counts its
        tokens as computed."""
        before, batch = layout.inputs, self._batch
        count, token_rows = len(before.rows), layout.token_rows
        positions = batch.num_computed(token_rows) + layout.ahead
        lens = positions + 1
        pages, offsets = batch.slots(token_rows, positions)
        tokens = batch.tokens[token_rows, positions].astype(np.int64)
        pages[:, count:] = NOWHERE
        batch.computed(layout.sequences, layout.counts)
        arrays = layout.arrays
        arrays["tokens"][...] = tokens
        arrays["positions"][...] = positions
        arrays["lens"][...] = lens
        arrays["pages"][...] = pages
        arrays["offsets"][...] = offsets
        # A sample comes after its position, and the first output token has number 0.
        arrays["indices"][before.sampled_at] = lens[before.sampled_at] - layout.num_before_output
        for name, array in decode_order(arrays["lens"]).items():
            arrays[name][...] = array
        return replace(
            before,
            tokens=tokens[:count],
            positions=positions[:count],
            context_lens=lens[:count],
            pages=pages[:, :count],
            offsets=offsets[:count],
        )


def _key(plan: Plan) -> LayoutKey:
    """A row with a draft computes one token more than its draft has."""
    drafted = tuple([int(draft.row) for draft in plan.drafts])
    return plan.rows.tobytes(), plan.num_tokens.tobytes(), plan.samples.tobytes(), drafted
