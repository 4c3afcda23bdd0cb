"""The rows that queries choose by an index, in Triton. Same signature as `reference.py`.

A score is a product over heads, its positive part, and their weighted sum. There are two ways:

    decodes    A program scores rows for one query. It writes one whole number for each row, smaller
               for a greater score and, of equal scores, for an earlier row. All of a query's
               numbers differ: torch's `topk` has no ties to break.
    prompts    A program scores rows for a block of queries of one sequence, so rows are read once
               for all of them. Then a program for each query counts the scores by their first 8
               bits, those of the chosen bin by the next 8, and so on: after four passes it knows
               the least score that is chosen, and how many of its equals are. A last pass writes
               what is chosen in the rows' order.

Both choose what the reference chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

MAX_RANKS, MAX_SCORES = 1 << 26, 1 << 27
"""Scored rows at once, of decodes and prompts: 512 MiB. More queries are taken in pieces."""
LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""
ROWS = 64
"""Rows that a program scores for one query."""
QUERIES, ROWS_OF_BLOCK = 64, 256
"""Of a program that scores for a block of queries."""
BLOCK_WARPS, BLOCK_STAGES = 8, 2
COUNTED, COUNT_WARPS = 1024, 4
"""Scores that a program counts at once."""
BITS = 8
"""Of a score that a pass looks at."""
NONE = tl.constexpr((1 << 63) - 1)


@triton.jit
def _ordered(score):
    """int32 that grows with the score. Both zeros are equal. Bits of positive numbers grow with
    them, those of negative ones shrink."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


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
    rank = (-1 - _ordered(score).to(tl.int64)) * (1 << 32) + n
    tl.store(to, tl.where(ok, rank, NONE), mask=n < num_rows)


@triton.jit
def _score_blocks(
    q, weights, pages, page_table, seqs, counts, blocks, out, first, last, num_rows, num_chosen,
    q_row, q_head, weights_row, table_row, page_stride, row_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_POW: tl.constexpr, DIM_POW: tl.constexpr,
    PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores of a block's queries from `first` to `last`, for some rows."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(1)
    begin = tl.maximum(tl.load(blocks + 2 * block), first)
    end = tl.minimum(tl.load(blocks + 2 * block + 1), last)
    if begin >= end:
        return
    most = tl.load(counts + end - 1)  # the last query sees the most rows
    if (tl.program_id(0) * ROWS >= most) | (most <= num_chosen):
        return
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = n < most
    h, d = tl.arange(0, HEADS_POW), tl.arange(0, DIM_POW)
    table = page_table + tl.load(seqs + begin) * table_row
    page = tl.load(table + n // PAGE_ROWS, mask=ok, other=0).to(tl.int64)
    rows = pages + page * page_stride + n % PAGE_ROWS * row_stride
    keys = tl.load(rows[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
    is_number = (d < DIM)[:, None] & (h < HEADS)[None, :]
    own = tl.load(weights + begin.to(tl.int64) * weights_row + h, mask=h < HEADS, other=0.0)
    for token in tl.range(begin, end, num_stages=STAGES):
        at = q + tl.cast(token, tl.int64) * q_row + h * q_head
        query = tl.load(at[None, :] + d[:, None], mask=is_number, other=0.0)
        scores = tl.maximum(tl.dot(keys, query, input_precision="ieee"), 0.0)
        score = tl.sum(scores * own.to(tl.float32)[None, :], axis=1)
        to = out + tl.cast(token - first, tl.int64) * num_rows + n
        tl.store(to, _ordered(score), mask=n < num_rows)
        # The next query's: a product does not wait for what is loaded so early.
        ahead = tl.cast(tl.minimum(token + 1, end - 1), tl.int64)
        own = tl.load(weights + ahead * weights_row + h, mask=h < HEADS, other=0.0)


@triton.jit
def _find_bin(
    scores, count, known, wanted, UNKNOWN: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the next bits to the `known` ones of the least score that is chosen. `wanted` is how many
    scores with these bits are chosen, before and after."""
    n, bins = tl.arange(0, BLOCK), tl.arange(0, 1 << BITS)
    found = tl.zeros((1 << BITS,), tl.int32)
    for begin in range(0, count, BLOCK):
        ok = begin + n < count
        value = tl.load(scores + begin + n, mask=ok, other=0) ^ -0x80000000
        value = value.to(tl.uint32, bitcast=True)
        if UNKNOWN < 32:
            ok = ok & ((value >> UNKNOWN) == known)
        bits = (value >> (UNKNOWN - BITS)) & ((1 << BITS) - 1)
        found += tl.histogram(bits.to(tl.int32), 1 << BITS, mask=ok)
    # In this bin or a higher one.
    upto = tl.cumsum(found, axis=0, reverse=True)
    its_bin = tl.sum((upto >= wanted).to(tl.int32), axis=0) - 1
    wanted -= tl.sum(tl.where(bins == its_bin, upto - found, 0), axis=0)
    return (known << BITS) | its_bin.to(tl.uint32), wanted


@triton.jit
def _choose(
    scores, counts, chosen, first, num_rows, chosen_row,
    CHOSEN: tl.constexpr, CHOSEN_POW: tl.constexpr, BITS: tl.constexpr, PASSES: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rows of a query's `CHOSEN` greatest scores, in order; of equal scores the first."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    query = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + first + query)
    to = chosen + (first + query) * chosen_row
    if count <= CHOSEN:
        k = tl.arange(0, CHOSEN_POW)
        tl.store(to + k, tl.where(k < count, k, -1).to(tl.int64), mask=k < CHOSEN)
        return
    own = scores + query * num_rows
    n = tl.arange(0, BLOCK)
    known = tl.full((), 0, tl.uint32)
    wanted = tl.full((), CHOSEN, tl.int32)
    for step in tl.static_range(PASSES):
        known, wanted = _find_bin(
            own, count, known, wanted, 32 - BITS * step,
            BITS if BITS * (step + 1) <= 32 else 32 - BITS * step, BLOCK,
        )  # fmt: skip
    least = known.to(tl.int32, bitcast=True) ^ -0x80000000
    equals, taken = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for begin in range(0, count, BLOCK):
        ok = begin + n < count
        value = tl.load(own + begin + n, mask=ok, other=0)
        is_equal = (ok & (value == least)).to(tl.int32)
        before = equals + tl.cumsum(is_equal, axis=0) - is_equal
        is_chosen = ok & ((value > least) | ((is_equal > 0) & (before < wanted)))
        taking = is_chosen.to(tl.int32)
        at = taken + tl.cumsum(taking, axis=0) - taking
        tl.store(to + at, (begin + n).to(tl.int64), mask=is_chosen)
        equals += tl.sum(is_equal, axis=0)
        taken += tl.sum(taking, axis=0)


def choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, num_chosen: int
) -> Tensor:
    """int64 [tokens, most]: the entries that each query attends to, by number, -1 for none. Scores
    are sums over heads of relu(q k), weighted, with q [tokens, heads, dim] and keys the last `dim`
    numbers of entries. Of equal scores the earlier entry's counts."""
    most = step.most_rows
    chosen = torch.full((len(q), min(num_chosen, most)), -1, device=q.device)
    if chosen.numel():
        choose = _by_ranks if step.prompts is None else _by_counts
        choose(q, weights, pages, step, chosen)
    return chosen


def _by_ranks(q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, chosen: Tensor) -> None:
    num_tokens, heads, dim = q.shape
    most = step.most_rows
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


def _by_counts(q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, chosen: Tensor) -> None:
    num_tokens, heads, dim = q.shape
    most = step.most_rows
    keys = pages[..., pages.shape[2] - dim :]
    counts = step.token_lens // step.group
    blocks = step.query_blocks(QUERIES)
    options = launch_options(q.device)
    rows = ROWS if q.dtype == torch.float32 else ROWS_OF_BLOCK
    at_once = max(1, MAX_SCORES // most)
    for first in range(0, num_tokens, at_once):
        count = min(at_once, num_tokens - first)
        scores = torch.empty(count, most, dtype=torch.int32, device=q.device)
        _score_blocks[(-(-most // rows), len(blocks))](
            q, weights, keys, step.page_table, step.token_seqs, counts, blocks, scores, first,
            first + count, most, chosen.shape[1], *q.stride()[:2], weights.stride(0),
            step.page_table.stride(0), *keys.stride()[:2], HEADS=heads, DIM=dim,
            HEADS_POW=padded(heads, LEAST), DIM_POW=padded(dim, LEAST), PAGE_ROWS=keys.shape[1],
            ROWS=rows, STAGES=BLOCK_STAGES, num_warps=BLOCK_WARPS, **options,
        )  # fmt: skip
        _choose[(count,)](
            scores, counts, chosen, first, most, chosen.stride(0), CHOSEN=chosen.shape[1],
            CHOSEN_POW=padded(chosen.shape[1]), BITS=BITS, PASSES=-(-32 // BITS),
            BLOCK=min(COUNTED, padded(most)), num_warps=COUNT_WARPS, **options,
        )  # fmt: skip
