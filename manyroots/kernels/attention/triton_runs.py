"""Decode attention for tokens that follow each other in one sequence, in Triton.

Same signature as `reference.py`. A step that checks guesses has several tokens of a row. A program
takes all of them, for the heads that share keys and values, and reads their history once. Each
token sees those before it and itself. `triton.py` takes steps without runs.

The number of runs is read on the device, and the programs of the grid are divided among them. So
one captured graph serves any division of its tokens. Scores are in units of log2, because the chip
computes exp2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.attention.paged import MAX_RUN, DecodeRows
from manyroots.kernels.attention.triton_merge import merge_parts
from manyroots.kernels.attention.triton_prefill import score_factors
from manyroots.kernels.launch import (
    counters,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)

MOST_PARTS = 16
"""Most parts of a history."""
FEW_ROWS = 16
"""With more rows, 8 histories of 4,096 tokens take 42 us in small tiles and 57 us in large ones."""
MOST_QUERIES = 64
"""Tokens times heads of a program, for heads of 128 numbers."""


@dataclass(frozen=True, slots=True)
class RunTiling:
    """Tile sizes for runs."""

    tokens: int
    """Tokens of the history that a program reads in one iteration."""
    num_warps: int
    num_stages: int
    num_programs: int
    """Programs that share a step's histories, at least one for each run and head."""
    parts: int = MOST_PARTS
    """Most parts of a history; a power of two."""


def tiling_for(num_rows: int, num_queries: int, head_dim: int, *, is_half: bool) -> RunTiling:
    """Of those measured on an H200 with Qwen3-8B's heads, the fastest sizes. `num_queries`: tokens
    times heads of a program. `is_half`: queries and pages share a dtype of two bytes."""
    if is_half and num_rows <= FEW_ROWS and num_queries * head_dim <= 32 * 128:
        # A tile of 128 tokens: 1 x 5 rows of 512 tokens take 7.3 us, and 9.5 us with the others.
        return RunTiling(tokens=128, num_warps=8, num_stages=2, num_programs=132)
    num_warps = 4 if is_half and num_queries * head_dim <= 32 * 128 else 8
    if is_half and head_dim <= 128:
        return RunTiling(tokens=64, num_warps=num_warps, num_stages=3, num_programs=2 * 132)
    return RunTiling(tokens=32, num_warps=num_warps, num_stages=2, num_programs=2 * 132)


@triton.jit
def _attend_to_run(
    q, layer_kv, page_table, context_lens, run_starts, num_runs, sinks, out, partial, sums,
    counters, scale, inner, window, table_row, page_stride, part_stride, token_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_POW: tl.constexpr, HEAD_DIM: tl.constexpr,
    PREFETCH_LINES: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr, BLOCK_T: tl.constexpr, MAX_PARTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a run's history, with all tokens of the run and all heads of a group,
    or with a piece of them. The last program of a run merges the parts."""
    log2_e: tl.constexpr = 1.4426950408889634
    let_next_begin(DEPENDENT)
    num_items = tl.load(num_runs) * (NUM_KV * PIECES)
    num_splits = tl.minimum(tl.maximum(NUM_PROGRAMS // num_items, 1), MAX_PARTS)
    item = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    if item >= num_items:
        # The next kernel waits only for this one, so no program may leave before the wait.
        wait_for_inputs(DEPENDENT)
        return
    piece = item % PIECES
    kv_head = item // PIECES % NUM_KV
    run = item // (PIECES * NUM_KV)
    first_row = tl.load(run_starts + run)
    num_tokens = tl.load(run_starts + run + 1) - first_row
    context = tl.load(context_lens + first_row + num_tokens - 1)
    lowest = tl.load(context_lens + first_row)
    begin = tl.where(window > 0, tl.maximum(lowest - window, 0), 0)
    per_split = tl.cdiv(tl.cdiv(context - begin, BLOCK_T), num_splits) * BLOCK_T
    first = begin + split * per_split
    if (first >= context) | (piece * BLOCK_M >= num_tokens * GROUP_POW):
        wait_for_inputs(DEPENDENT)
        return
    num_used = tl.cdiv(context - begin, per_split)
    last = tl.minimum(context, first + per_split)
    m = piece * BLOCK_M + tl.arange(0, BLOCK_M)
    g = m % GROUP_POW
    is_query = (m // GROUP_POW < num_tokens) & (g < GROUP)
    # What is no query repeats one.
    row = first_row + tl.minimum(m // GROUP_POW, num_tokens - 1)
    head = kv_head * GROUP + tl.minimum(g, GROUP - 1)
    row_head = row.to(tl.int64) * (NUM_KV * GROUP) + head
    ends = tl.load(context_lens + row)
    begins = tl.where(window > 0, ends - window, 0)
    d = tl.arange(0, HEAD_DIM)
    layer_kv += kv_head * HEAD_DIM
    page_table += first_row * table_row
    early = tl.minimum(first + tl.arange(0, BLOCK_T), last - 1)
    page = tl.load(page_table + early // PAGE_SIZE)
    # Loaded now and read after the wait: entries of new tokens are not written yet.
    lines = tl.arange(0, PREFETCH_LINES) * (HEAD_DIM // PREFETCH_LINES)
    early_at = page.to(tl.int64) * page_stride + early % PAGE_SIZE * token_stride
    prefetch(layer_kv + early_at[:, None] + lines[None, :], DEPENDENT)
    prefetch(layer_kv + part_stride + early_at[:, None] + lines[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)
    query = tl.load(q + row_head[:, None] * HEAD_DIM + d[None, :])
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    if HAS_SINKS:
        if split == 0:
            best = tl.load(sinks + head).to(tl.float32) * log2_e
            total += 1.0
    for at in range(first, last, BLOCK_T):
        t = at + tl.arange(0, BLOCK_T)
        ok = (t < last)[:, None]
        # These pages were looked up one tile ago, so their keys wait for no other load.
        token_at = page.to(tl.int64) * page_stride + t % PAGE_SIZE * token_stride
        page = tl.load(page_table + tl.minimum(t + BLOCK_T, last - 1) // PAGE_SIZE)
        keys_at = layer_kv + token_at[:, None] + d[None, :]
        keys = tl.load(keys_at, mask=ok, other=0.0).to(query.dtype)
        values = tl.load(keys_at + part_stride, mask=ok, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if HAS_CAP:
            scores = 2.0 * tl.sigmoid(2.0 * inner * scores) - 1.0  # tanh(inner * scores)
        is_seen = (t[None, :] < tl.minimum(ends, last)[:, None]) & (t[None, :] >= begins[:, None])
        scores = tl.where(is_seen, scores * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A token that has seen nothing yet would compute -inf - -inf here.
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - anchor)
        weights = tl.exp2(scores - anchor[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        best = higher
    has_seen = total > 0.0
    acc = acc / tl.where(has_seen, total, 1.0)[:, None]
    if num_used == 1:
        tl.store(out + row_head[:, None] * HEAD_DIM + d[None, :], acc, mask=is_query[:, None])
    else:
        slot = row_head * MAX_PARTS + split
        to = partial + slot[:, None] * HEAD_DIM + d[None, :]
        tl.store(to, acc, mask=is_query[:, None])
        size = tl.where(has_seen, best + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
        tl.store(sums + slot, size, mask=is_query)
        # Store all results, then count: the program that counts last sees all results.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + item, 1, sem="acq_rel")
        if arrived == num_used - 1:
            tl.store(counters + item, 0)
            merge_parts(partial, sums, out, row_head, num_used, MAX_PARTS, BLOCK_M, HEAD_DIM)


def decode_runs(
    q: Tensor,
    layer_kv: Tensor,
    rows: DecodeRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    out: Tensor | None = None,
    tiling: RunTiling | None = None,
) -> Tensor:
    """One query per row, q [num_rows, heads, head_dim], as `decode_attention`; `rows` has runs."""
    runs = rows.runs
    assert runs is not None, "see DecodeRows"
    num_rows, heads, head_dim = q.shape
    page_size, kv_heads = layer_kv.shape[2:4]
    group = heads // kv_heads
    group_pow = triton.next_power_of_2(group)
    is_half = q.dtype == layer_kv.dtype and q.element_size() == 2
    out = torch.empty_like(q) if out is None else out
    # At least what a matrix instruction takes, at most what registers hold.
    most = MOST_QUERIES if head_dim <= 128 else MOST_QUERIES // 2
    block_m = max(16, min(most, MAX_RUN * group_pow))
    cut = tiling or tiling_for(num_rows, block_m, head_dim, is_half=is_half)
    pieces = triton.cdiv(MAX_RUN * group_pow, block_m)
    most_items = (runs.starts.shape[0] - 1) * kv_heads * pieces
    shape = (num_rows * heads * cut.parts,)
    # Not `scratch`: a captured graph keeps its allocations, and a growing buffer would move.
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    _attend_to_run[(max(cut.num_programs, most_items),)](
        q, layer_kv, rows.page_table, rows.context_lens, runs.starts, runs.count,
        q if sinks is None else sinks, out, partial, sums, counters(q.device),
        *score_factors(scale, cap), window, rows.page_table.stride(0),
        *(layer_kv.stride(i) for i in range(3)),
        NUM_KV=kv_heads, GROUP=group, GROUP_POW=group_pow, HEAD_DIM=head_dim,
        PREFETCH_LINES=max(1, head_dim * layer_kv.element_size() // 128), PAGE_SIZE=page_size,
        BLOCK_M=block_m, PIECES=pieces, BLOCK_T=cut.tokens, MAX_PARTS=cut.parts,
        NUM_PROGRAMS=cut.num_programs, HAS_SINKS=sinks is not None, HAS_CAP=cap > 0.0,
        num_warps=cut.num_warps, num_stages=cut.num_stages, **launch_options(q.device),
    )  # fmt: skip
    return out
