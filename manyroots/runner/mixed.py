"""Steps of prompts beside decodes, padded so that a graph computes them.

Takes a step; gives the next larger shape there is, and the step's arrays in that shape. Only the
number of tokens costs anything when it is padded: sequences that are not there have no tokens, and
their programs leave at once. So there are many numbers of tokens, and few of rows. All shapes are
captured when an engine starts, so they are no more than it takes seconds for.

    tokens   | d0 | d1 | p0 .... | p1 .... | padding  |
    rows     | d0 | d1 | none .. | p0 | p1 | none ... |
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.attention.paged import QUERY_BLOCK
from manyroots.runner.inputs import NOWHERE, StepInputs
from manyroots.runner.step_arrays import (
    NamedArrays,
    adapter_arrays,
    decode_order,
    sequence_arrays,
    token_arrays,
)
from manyroots.step import Int32s

TOKENS = (*range(128, 1024, 64), *range(1024, 2049, 128))
"""Close together: what is padded is computed. Beyond, a step takes longer than the host needs to
launch its kernels one by one."""
TOKENS_BESIDE_FEW = (*range(128, 1024, 128), *range(1024, 2049, 256))
"""Where few rows decode, padding delays no request."""
DECODES = (16, 64)
"""Few rows; others are as many as there may be. For few, a long history is cut into more parts."""
MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class MixedShape:
    """How large a step is as a graph."""

    num_tokens: int
    num_decodes: int
    """Rows of one token, at most."""
    num_samples: int
    """Tokens after which something is sampled, at most."""


def all_shapes(max_num_seqs: int, max_num_tokens: int) -> list[MixedShape]:
    """All shapes of steps with at most this many tokens, the largest first."""
    most = TOKENS[min(bisect_left(TOKENS, max_num_tokens), len(TOKENS) - 1)]
    shapes = {
        _shape(tokens, num_decodes, max_num_seqs)
        for tokens in TOKENS
        for num_decodes in (*DECODES, max_num_seqs)
        if tokens <= most
    }
    return sorted(shapes, key=lambda s: (s.num_tokens, s.num_decodes), reverse=True)


def shape_for(inputs: StepInputs, max_num_seqs: int) -> MixedShape | None:
    """The next larger shape; None if there is none."""
    num_tokens, num_decodes = len(inputs.tokens), inputs.num_decodes
    if num_tokens > TOKENS[-1] or len(inputs.rows) - num_decodes > MAX_PROMPTS:
        return None
    shape = _shape(num_tokens, num_decodes, max_num_seqs)
    # A row with guesses is sampled at each of them.
    return shape if len(inputs.sampled_at) <= shape.num_samples else None


def _shape(num_tokens: int, num_decodes: int, max_num_seqs: int) -> MixedShape:
    """The next larger one."""
    sizes = TOKENS_BESIDE_FEW if num_decodes <= DECODES[-1] else TOKENS
    tokens = sizes[bisect_left(sizes, num_tokens)]
    rows = next((count for count in DECODES if count >= num_decodes), max_num_seqs)
    rows = min(rows, max_num_seqs, tokens)
    return MixedShape(tokens, rows, min(rows + MAX_PROMPTS, max_num_seqs))


def mixed_arrays(
    inputs: StepInputs, shape: MixedShape, *, num_slots: int, spare_row: int
) -> NamedArrays | None:
    """A step in a shape that it fits into; None where its adapters do not: one that begins within
    a prompt may cut it into more blocks than there is room for."""
    count, tokens = inputs.num_decodes, token_arrays(inputs)
    sequences = sequence_arrays(inputs)
    num_rows = shape.num_decodes + MAX_PROMPTS
    prompts = slice(shape.num_decodes, shape.num_decodes + len(inputs.rows) - count)
    lens, rows = np.zeros(num_rows, np.int32), np.full(num_rows, spare_row, np.int64)
    for to, all_ in ((lens, sequences["lens"]), (rows, sequences["rows"])):
        to[:count], to[prompts] = all_[:count], all_[count:]
    starts = sequences["starts"]
    most_blocks = shape.num_tokens // QUERY_BLOCK + MAX_PROMPTS
    arrays = {
        "tokens": _filled(tokens["tokens"], shape.num_tokens, 0),
        "token_rows": _filled(tokens["token_rows"], shape.num_tokens, spare_row),
        "positions": _filled(tokens["positions"], shape.num_tokens, 0),
        "pages": _filled(tokens["pages"], shape.num_tokens, NOWHERE),
        "offsets": _filled(tokens["offsets"], shape.num_tokens, 0),
        "lens": lens,
        "rows": rows,
        "starts": _filled(starts, MAX_PROMPTS + 1, starts[-1]),
        # A block that begins after a sequence's last query has none.
        "blocks": _filled(sequences["blocks"].T, most_blocks, shape.num_tokens).T,
        "sampled_at": _filled(inputs.sampled_at, shape.num_samples, 0),
    }
    arrays["blocks"][len(sequences["blocks"]) :, 0] = 0
    arrays |= decode_order(lens[: shape.num_decodes])
    if inputs.token_slots is None:
        return arrays
    slots = _filled(inputs.token_slots, shape.num_tokens, NO_ADAPTER)
    heads = _filled(inputs.token_slots[inputs.sampled_at], shape.num_samples, NO_ADAPTER)
    own = adapter_arrays(slots, 2 * num_slots + 2)
    of_head = adapter_arrays(heads, 2 * num_slots + 2)
    if own is None or of_head is None:
        return None
    return {**arrays, **own, **{f"head_{name}": array for name, array in of_head.items()}}


def _filled(array: np.ndarray, size: int, value: int) -> np.ndarray:
    """The last dimension lengthened to `size`."""
    filled = np.full((*array.shape[:-1], size), value, array.dtype)
    filled[..., : array.shape[-1]] = array
    return filled


def sampled_rows(inputs: StepInputs, shape: MixedShape, spare_row: int) -> Int32s:
    """The row that each token after a sampled one is for; the spare row beyond."""
    return _filled(inputs.rows[inputs.sampling], shape.num_samples, spare_row)
