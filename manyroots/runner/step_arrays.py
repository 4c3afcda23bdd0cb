"""A step's small inputs as numpy arrays, ready for one copy to the device.

Takes the flat `StepInputs`; gives named arrays, which `forward.py` reads as views. Those of a
decode step are padded to a graph's size: padding repeats the last sequence, so that it asks for
nothing new (the same pages, the same adapter, the same experts), and writes nowhere.
"""

from __future__ import annotations

import numpy as np

from manyroots.kernels.attention.paged import longest_first, query_blocks, token_runs
from manyroots.kernels.lora_ops.sites import block_rows_for, most_blocks, row_blocks
from manyroots.runner.inputs import NOWHERE, Int64s, StepInputs
from manyroots.step import Int32s

NamedArrays = dict[str, np.ndarray]
RUN_NAMES = ("run_starts", "num_runs")


def token_arrays(inputs: StepInputs) -> NamedArrays:
    """What every token has."""
    return {
        "tokens": inputs.tokens,
        "token_rows": inputs.token_rows.astype(np.int64),
        "positions": inputs.positions,
        "pages": inputs.pages,
        "offsets": inputs.offsets.astype(np.int32),
    }


def sequence_arrays(inputs: StepInputs) -> NamedArrays:
    """What mixers need: decoding sequences first, the others cut into blocks of queries."""
    lens = inputs.context_lens.astype(np.int32)
    own: NamedArrays = {"lens": lens}
    if len(inputs.units):
        own["units"] = inputs.units
    if inputs.is_decode:
        return own
    count = inputs.num_decodes
    starts = inputs.query_starts[count:]
    return {
        **own,
        "rows": inputs.rows.astype(np.int64),
        "starts": starts.astype(np.int32),
        "blocks": query_blocks(starts.tolist(), lens[count:].tolist()),
    }


def decode_order(lens: Int32s) -> NamedArrays:
    """The order to begin rows that decode, if they are many."""
    order = longest_first(lens)
    return {} if order is None else {"order": order}


def run_arrays(rows: Int64s, lens: Int32s) -> NamedArrays:
    """Which tokens of a padded step of single tokens follow each other in one sequence."""
    starts, count = token_runs(rows, lens)
    return dict(zip(RUN_NAMES, (starts, np.array([count], np.int32)), strict=True))


def decode_arrays(
    inputs: StepInputs, *, size: int, num_slots: int, spare_units: Int32s
) -> NamedArrays:
    """A step of single tokens, padded to `size`. `num_slots`: how many adapters there may be.
    `spare_units`: whose states padding computes, by family of states."""
    arrays = {**token_arrays(inputs), **sequence_arrays(inputs)}
    padding = size - len(inputs.rows)
    arrays = {name: _padded(array, padding) for name, array in arrays.items()}
    arrays |= decode_order(arrays["lens"])
    arrays["pages"][:, len(inputs.rows) :] = NOWHERE
    if "units" in arrays:
        arrays["units"][:, len(inputs.rows) :] = spare_units[:, None]
    if inputs.token_slots is not None:
        own = adapter_arrays(_padded(inputs.token_slots, padding), num_slots)
        assert own is not None, "rows of one adapter lie together"
        arrays.update(own)
    return arrays


def _padded(array: np.ndarray, count: int) -> np.ndarray:
    """Repeat the last element. `np.pad` would take longer than everything else here."""
    size = array.shape[-1]
    padded = np.empty((*array.shape[:-1], size + count), array.dtype)
    padded[..., :size] = array
    padded[..., size:] = array[..., -1:]
    return padded


def adapter_arrays(slots: Int64s, num_runs: int) -> NamedArrays | None:
    """Which adapter each token wants, in as many blocks as there may be at most with so many runs
    of one adapter; None if there are more."""
    size = block_rows_for(len(slots))
    cut = row_blocks(slots, size)
    blocks = np.zeros((most_blocks(len(slots), num_runs, size), 3), np.int32)
    if len(cut) > len(blocks):
        return None
    blocks[: len(cut)] = cut
    return {
        "adapter_slots": slots.astype(np.int32),
        "adapter_blocks": blocks,
        "num_adapter_blocks": np.array([len(cut)], np.int32),
    }


def sampling_rows(inputs: StepInputs, *, size: int, spare_row: int) -> Int32s:
    """Of a decode step, the row that each token's successor is for: the spare row if it does not
    sample, and for padding."""
    rows = np.full(size, spare_row, np.int32)
    rows[inputs.sampled_at] = inputs.rows[inputs.sampling]
    return rows
