"""All arrays of a step as they are sent to the device: for any step, or padded for a graph.

Takes a step's inputs; adds what the sampler reads of the rows' state, and what decoding rows share.
"""

from __future__ import annotations

import numpy as np

from manyroots.runner.batch import PersistentBatch
from manyroots.runner.device_rows import DeviceRows
from manyroots.runner.graphs import GraphKey
from manyroots.runner.inputs import StepInputs, blank_decode, blank_prefill, table_rows_of
from manyroots.runner.mixed import MixedShape, mixed_arrays, sampled_rows
from manyroots.runner.sampling_state import SamplingState
from manyroots.runner.sharing import Sharing, blank
from manyroots.runner.step_arrays import (
    RUN_NAMES,
    NamedArrays,
    decode_arrays,
    decode_order,
    run_arrays,
    sampling_rows,
    sequence_arrays,
    token_arrays,
)
from manyroots.step import Int32s

SHARED_DRAFT_LEN = 4096
"""With shorter contexts, finding out what sequences share takes longer than reading it again."""


class StepPackets:
    """Makes the arrays of steps of one runner."""

    def __init__(
        self,
        batch: PersistentBatch,
        state: SamplingState,
        rows: DeviceRows,
        sharing: Sharing | None,
        *,
        num_slots: int,
        num_paged: int,
    ) -> None:
        """`sharing`: None where kernels group rows by themselves. `num_slots`: adapters at once.
        `num_paged`: families of pages."""
        self._batch, self._state, self._spare = batch, state, rows.spare
        self._sharing, self._num_slots, self._num_paged = sharing, num_slots, num_paged

    def any_step(self, inputs: StepInputs) -> NamedArrays:
        """The arrays of a step without padding."""
        sequences, at = sequence_arrays(inputs), np.arange(len(inputs.sampled_at))
        return {
            **token_arrays(inputs),
            **sequences,
            **decode_order(sequences["lens"][: inputs.num_decodes]),
            **self.shared(inputs, inputs.num_decodes),
            "sampled_at": inputs.sampled_at,
            **self._sampling(inputs, inputs.rows[inputs.sampling], at),
        }

    def single_tokens(self, inputs: StepInputs, size: int) -> NamedArrays:
        """The arrays of a step whose sequences have one token each, padded to `size`."""
        arrays = decode_arrays(
            inputs, size=size, num_slots=self._num_slots, spare_units=self._spare.units
        )
        rows = sampling_rows(inputs, size=size, spare_row=self._spare.row)
        return {**arrays, **self._sampling(inputs, rows, inputs.sampled_at)}

    def mixed(self, inputs: StepInputs, shape: MixedShape) -> NamedArrays | None:
        """The arrays of a step of prompts and decodes in this `shape`; None if it does not fit."""
        spare_row = self._spare.row
        arrays = mixed_arrays(inputs, shape, num_slots=self._num_slots, spare_row=spare_row)
        if arrays is None:
            return None
        rows = sampled_rows(inputs, shape, spare_row)
        at = np.arange(len(inputs.sampled_at))
        return {**arrays, **self._sampling(inputs, rows, at)}

    def shared(self, inputs: StepInputs, size: int) -> NamedArrays:
        """The prefixes that decoding rows share, padded to `size`; {} if sharing gains nothing."""
        return {} if self._sharing is None else self._sharing.arrays(inputs, size)

    def with_shared(self, inputs: StepInputs, arrays: NamedArrays) -> NamedArrays:
        """The arrays of a step of single tokens that checks guesses, which have runs: a sequence's
        history is read once for all of its tokens. If several sequences share long prefixes, these
        are read once instead."""
        lens = inputs.context_lens
        if self._sharing is not None and lens.max() > SHARED_DRAFT_LEN:
            is_first = np.append(True, inputs.rows[1:] != inputs.rows[:-1])
            if self._sharing.gains(inputs.rows[is_first], lens[is_first]):
                own = {name: a for name, a in arrays.items() if name not in RUN_NAMES}
                return own | self.shared(inputs, len(arrays["lens"]))
        return arrays

    def blank(self, key: GraphKey) -> NamedArrays:
        """The arrays of a step that changes nothing, with the sizes and types of every other."""
        num_rows = key.size
        if key.mixed is None:
            inputs = blank_decode(key.size, self._spare, with_adapters=key.with_adapters)
            arrays = self.single_tokens(inputs, key.size)
        else:
            num_rows = key.mixed.num_decodes
            inputs = blank_prefill(2, self._spare, with_adapters=key.with_adapters)
            mixed = self.mixed(inputs, key.mixed)
            assert mixed is not None, "one run always fits"
            arrays = mixed
        if key.in_runs:
            arrays |= run_arrays(arrays["token_rows"], arrays["lens"])
        if key.shares:
            arrays |= blank(self._num_paged, num_rows)
        return arrays

    def _sampling(self, inputs: StepInputs, rows: Int32s, at: np.ndarray) -> NamedArrays:
        """What the sampler reads of `rows`; those `at` these places are sampled, the others are
        padding."""
        tables, indices = rows.copy(), np.zeros(len(rows), np.int64)
        tables[at] = table_rows_of(inputs, self._spare.row)
        indices[at] = self._batch.num_output_tokens(rows[at]) + inputs.guesses
        return self._state.arrays(rows, indices, tables)
