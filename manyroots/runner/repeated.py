"""Steps with guesses that are laid out as an earlier one, so that only their positions move.

While the same rows check as many guesses as before, most arrays of a step are those of the earlier
step. Takes a plan and the batch; gives the inputs and arrays of the step, or None if no earlier
step is alike. A step with guesses is launched while the device idles, so its host time counts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.inputs import NOWHERE, Int64s, StepInputs
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.step_arrays import NamedArrays, decode_order
from manyroots.step import Int32s, Plan

MAX_LAYOUTS = 32
"""Divisions of guesses among rows that are kept."""

LayoutKey = tuple[bytes, bytes, bytes, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """What stays the same from step to step."""

    inputs: StepInputs
    """Of the step that it was made of, with a row for each token."""
    arrays: NamedArrays
    """Of that step, padded. Those that `RepeatedSteps` makes anew have no meaning here."""
    token_rows: Int64s
    """Row of each token, padding included."""
    ahead: Int64s
    """Of each token, how many tokens of its row come before it in the step."""
    sequences: Int32s
    counts: Int64s
    """The rows that compute, and their number of tokens."""
    sampled_rows: Int32s


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
        if key not in self._layouts:
            return None
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def keep(self, plan: Plan, inputs: StepInputs, arrays: NamedArrays) -> None:
        """Keep the layout of a step with a row for each token; `arrays` are padded."""
        rows = inputs.rows[inputs.sampling]
        if self._batch.may_change_adapter(inputs.rows) or self._state.changes_with_length(rows):
            return
        token_rows = arrays["token_rows"]
        sequences = plan.rows
        begin = np.zeros(len(self._batch.num_tokens), np.int64)
        begin[sequences] = self._batch.num_computed(sequences) - plan.num_tokens
        self._layouts[_key(plan)] = StepLayout(
            inputs,
            arrays,
            token_rows,
            arrays["positions"] - begin[token_rows],
            sequences,
            plan.num_tokens.astype(np.int64),
            rows,
        )
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)

    def step(self, layout: StepLayout) -> tuple[StepInputs, NamedArrays]:
        """The inputs and the padded arrays of the next such step; counts its tokens as computed."""
        before, batch = layout.inputs, self._batch
        count, token_rows = len(before.rows), layout.token_rows
        positions = batch.num_computed(token_rows) + layout.ahead
        lens = positions + 1
        pages, offsets = batch.slots(token_rows, positions)
        tokens = batch.tokens[token_rows, positions].astype(np.int64)
        batch.computed(layout.sequences, layout.counts)
        indices = np.zeros(len(token_rows), np.int64)
        said = batch.num_output_tokens(layout.sampled_rows) + before.guesses
        indices[before.sampled_at] = said
        inputs = replace(
            before,
            tokens=tokens[:count],
            positions=positions[:count],
            context_lens=lens[:count],
            pages=pages[:, :count],
            offsets=offsets[:count],
        )
        arrays = {
            **layout.arrays,
            "tokens": tokens,
            "positions": positions,
            "lens": lens.astype(np.int32),
            "pages": pages,
            "offsets": offsets.astype(np.int32),
            "indices": indices,
        }
        pages[:, count:] = NOWHERE
        return inputs, {**arrays, **decode_order(arrays["lens"])}


def _key(plan: Plan) -> LayoutKey:
    drafts = tuple((int(draft.row), len(draft.tokens)) for draft in plan.drafts)
    return plan.rows.tobytes(), plan.num_tokens.tobytes(), plan.samples.tobytes(), drafts
