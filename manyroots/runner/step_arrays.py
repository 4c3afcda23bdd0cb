"""A step's small inputs as numpy arrays, ready for one copy to the device.

Takes the flat `StepInputs` and the rows' sampling parameters; gives named arrays. Those of a
decode step are padded to a graph's size: padding repeats the last sequence, so that it asks for
nothing new (the same pages, the same adapter, the same experts), and writes nowhere.
"""

from __future__ import annotations

import numpy as np

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.attention.paged import QUERY_BLOCK
from manyroots.kernels.lora_sites.sites import block_rows_for, most_blocks, row_blocks
from manyroots.runner.inputs import NOWHERE, Int64s, StepInputs
from manyroots.runner.sampling_state import SamplingState
from manyroots.step import Int32s

Arrays = dict[str, np.ndarray]


def token_arrays(inputs: StepInputs) -> Arrays:
    """What every token has."""
    return {
        "tokens": inputs.tokens,
        "token_rows": inputs.token_rows.astype(np.int64),
        "positions": inputs.positions,
        "pages": inputs.pages,
        "offsets": inputs.offsets.astype(np.int32),
    }


def sequence_arrays(inputs: StepInputs) -> Arrays:
    """What attention needs: decoding sequences first, the others cut into blocks of queries."""
    count = inputs.num_decodes
    starts = inputs.query_starts[count:] - inputs.query_starts[count]
    lens = inputs.context_lens
    return {
        "rows": inputs.rows.astype(np.int64),
        "lens": lens.astype(np.int32),
        "starts": starts.astype(np.int32),
        "blocks": _query_blocks(np.diff(starts), lens[count:]),
    }


def _query_blocks(counts: Int64s, context_lens: Int64s) -> np.ndarray:
    """(sequence, first query) of each block; what sees the most comes first."""
    blocks = [
        (seq, first) for seq, count in enumerate(counts) for first in range(0, count, QUERY_BLOCK)
    ]
    blocks.sort(key=lambda block: counts[block[0]] - context_lens[block[0]] - block[1])
    return np.array(blocks, np.int32).reshape(-1, 2)


def adapter_arrays(slots: Int64s, *, max_blocks: int | None = None) -> Arrays:
    """Which adapter each token wants; `max_blocks` fixes the size for a graph."""
    cut = row_blocks(slots, block_rows_for(len(slots)))
    blocks = np.zeros((max_blocks or len(cut), 3), np.int32)
    blocks[: len(cut)] = cut
    return {
        "adapter_slots": slots.astype(np.int32),
        "adapter_blocks": blocks,
        "num_adapter_blocks": np.array([len(cut)], np.int32),
    }


def sampling_arrays(rows: Int32s, state: SamplingState, indices: Int64s) -> Arrays:
    """How each of these rows draws its token number `indices`."""
    return {
        "out_rows": rows.astype(np.int64),
        "temperature": state.temperature[rows],
        "seeds": state.seed[rows].view(np.int64),
        "indices": indices.astype(np.int64),
    }


def decode_arrays(
    inputs: StepInputs, sampling: Arrays, *, size: int, spare_row: int, num_slots: int | None
) -> Arrays:
    """A step of single tokens, padded to `size`; with adapters if `num_slots` is given.

    `sampling` is of all its rows; what rows that do not sample draw goes to the spare row.
    """
    arrays = {**token_arrays(inputs), "lens": inputs.context_lens.astype(np.int32), **sampling}
    padding = size - len(inputs.rows)
    arrays = {name: _padded(array, padding) for name, array in arrays.items()}
    arrays["pages"][:, len(inputs.rows) :] = NOWHERE
    samples = np.zeros(size, np.bool_)
    samples[inputs.sampling] = True
    arrays["out_rows"][~samples] = spare_row
    if num_slots is not None:
        slots = inputs.token_slots
        if slots is None:
            slots = np.full(len(inputs.rows), NO_ADAPTER, np.int64)
        padded = np.pad(slots, (0, padding), "edge")
        max_blocks = most_blocks(size, num_slots, block_rows_for(size))
        arrays.update(adapter_arrays(padded, max_blocks=max_blocks))
    return arrays


def _padded(array: np.ndarray, count: int) -> np.ndarray:
    return np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, count)], "edge")


def blank_decode_arrays(
    *, size: int, spare_row: int, num_families: int, num_slots: int | None
) -> Arrays:
    """A decode step that changes nothing: to compile with, and to capture."""
    arrays: Arrays = {
        "tokens": np.zeros(size, np.int64),
        "token_rows": np.full(size, spare_row, np.int64),
        "positions": np.zeros(size, np.int64),
        "pages": np.full((num_families, size), NOWHERE, np.int32),
        "offsets": np.zeros(size, np.int32),
        "lens": np.ones(size, np.int32),
        "out_rows": np.full(size, spare_row, np.int64),
        "temperature": np.zeros(size, np.float32),
        "seeds": np.zeros(size, np.int64),
        "indices": np.zeros(size, np.int64),
    }
    if num_slots is not None:
        max_blocks = most_blocks(size, num_slots, block_rows_for(size))
        arrays.update(adapter_arrays(np.full(size, NO_ADAPTER, np.int64), max_blocks=max_blocks))
    return arrays
