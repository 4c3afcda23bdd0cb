"""The rows that queries choose by an index, in Triton. Same signature as `reference.py`.

A kernel scores rows for one query: a product over heads, its positive part, and their weighted sum.
It writes one whole number for each row, smaller for a greater score and, of equal scores, for an
earlier row. All of a query's numbers differ: torch's `topk` has no ties to break, and chooses what
the reference chooses. A row's own number is in the lower half, so that zeros are numbers of rows,
too: kernels that are only compiled leave zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

MAX_RANKS = 1 << 26
"""Numbers of scored rows at once: 512 MiB. More queries are taken in several pieces."""
LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""
ROWS = 64
"""Rows that a program scores."""
NONE = tl.constexpr((1 << 63) - 1)


@triton.jit
def _rank(
    q, weights, pages, page_table, seqs, counts, out, first, num_rows, q_row, q_head, weights_row,
    table_row, page_stride, row_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_POW: tl.constexpr, DIM_POW: tl.constexpr,
    PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1) + first
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    to = out + tl.program_id(1).to(tl.int64) * num_rows + n
    count = tl.load(counts + token)
    if tl.program_id(0) * ROWS >= count:
        tl.store(to, tl.full((ROWS,), NONE, tl.int64), mask=n < num_rows)
        return
    ok = n < count
    h, d = tl.arange(0, HEADS_POW), tl.arange(0, DIM_POW)
    at = q + token.to(tl.int64) * q_row + h * q_head
    is_number = (h < HEADS)[:, None] & (d < DIM)[None, :]
    query = tl.load(at[:, None] + d[None, :], mask=is_number, other=0.0)
    table = page_table + tl.load(seqs + token) * table_row
    page = tl.load(table + n // PAGE_ROWS, mask=ok, other=0).to(tl.int64)
    rows = pages + page * page_stride + n % PAGE_ROWS * row_stride
    keys = tl.load(rows[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
    scores = tl.maximum(tl.dot(query, tl.trans(keys), input_precision="ieee"), 0.0)
    own = tl.load(weights + token.to(tl.int64) * weights_row + h, mask=h < HEADS, other=0.0)
    score = tl.sum(scores * own.to(tl.float32)[:, None], axis=0)
    # Both zeros are equal. Bits of positive numbers grow with them, those of negative ones shrink.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = (-1 - bits.to(tl.int64)) * (1 << 32) + n
    tl.store(to, tl.where(ok, rank, NONE), mask=n < num_rows)


def choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, num_chosen: int
) -> Tensor:
    """int64 [tokens, most]: the entries that each query attends to, by number, -1 for none. Scores
    are sums over heads of relu(q k), weighted, with q [tokens, heads, dim] and keys the last `dim`
    numbers of entries. Of equal scores the earlier entry's counts."""
    num_tokens, heads, dim = q.shape
    most = step.most_rows
    chosen = torch.full((num_tokens, min(num_chosen, most)), -1, device=q.device)
    if not chosen.numel():
        return chosen
    keys = pages[..., pages.shape[2] - dim :]
    counts = step.token_lens // step.group
    at_once = max(1, MAX_RANKS // most)
    for first in range(0, num_tokens, at_once):
        count = min(at_once, num_tokens - first)
        ranks = torch.empty(count, most, dtype=torch.int64, device=q.device)
        _rank[(-(-most // ROWS), count)](
            q, weights, keys, step.page_table, step.token_seqs, counts, ranks, first, most,
            *q.stride()[:2], weights.stride(0), step.page_table.stride(0), *keys.stride()[:2],
            HEADS=heads, DIM=dim, HEADS_POW=padded(heads, LEAST), DIM_POW=padded(dim, LEAST),
            PAGE_ROWS=keys.shape[1], ROWS=ROWS, num_warps=4, **launch_options(q.device),
        )  # fmt: skip
        best = ranks.topk(chosen.shape[1], dim=1, largest=False).values
        numbers = torch.where(best == NONE.value, -1, best & 0xFFFFFFFF)
        chosen[first : first + count] = numbers
    return chosen
