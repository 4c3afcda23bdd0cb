"""Chunked prefill over pages, in Triton: any number of queries per sequence, causal.

Same signature as `reference.py`. A program takes a block of queries of a few heads that share keys
and values, and loops over their visible tokens tile by tile. It masks only tiles that some query
sees in part: the last tiles and, with a window, the first. It reads exactly the tokens that a query
sees. Scores are in units of log2, because the chip computes exp2. `triton_hopper.py` takes the
inputs that it supports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.attention import triton_hopper
from manyroots.kernels.attention.paged import QUERY_BLOCK, PrefillSegments
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Tile sizes of queries and tokens; found by measurement."""

    queries: int
    """Queries of each head; a divisor of QUERY_BLOCK."""
    tokens: int
    num_warps: int
    heads: int = 1
    """Heads of a program; they share keys and values."""
    max_registers: int | None = None
    """Registers of a thread, so that two programs fit on a multiprocessor."""


@triton.jit
def _over_tiles(
    query, best, total, acc, kv, table, position, begin, end, earliest, context, scale, inner,
    window, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_CAP: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Accumulate the tokens [begin, end) into the best score, the sum of weights and the sum of
    values. MASKED: some query does not see all of them; EDGE: also because of a window."""
    i = tl.arange(0, BLOCK_T)
    for at in range(begin, end, BLOCK_T):
        t = at + i
        ok = t < context
        if EDGE:  # pages before the first query's window may belong to another request by now
            ok &= t >= earliest
        if BLOCK_T % PAGE_SIZE == 0:  # tiles start with a page: mostly loop-invariant
            page_at = table + at // PAGE_SIZE + i // PAGE_SIZE
            in_page = i % PAGE_SIZE
        else:
            page_at = table + t // PAGE_SIZE
            in_page = t % PAGE_SIZE
        to_token = (in_page * TOKEN_STRIDE)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        if MASKED:
            page = tl.load(page_at, mask=ok, other=0).to(tl.int64)
            keys_at = kv + (page * PAGE_STRIDE)[:, None] + to_token
            keys = tl.load(keys_at, mask=ok[:, None], other=0.0)
            values = tl.load(keys_at + PART_STRIDE, mask=ok[:, None], other=0.0)
        else:
            keys_at = kv + (tl.load(page_at).to(tl.int64) * PAGE_STRIDE)[:, None] + to_token
            keys = tl.load(keys_at)
            values = tl.load(keys_at + PART_STRIDE)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if HAS_CAP:
            scores = 2.0 * tl.sigmoid(2.0 * inner * scores) - 1.0  # tanh(inner * scores)
        if MASKED:
            seen = t[None, :] <= position[:, None]
            if EDGE:
                seen &= t[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1) * scale)
        # A query that has seen no key yet would compute -inf - -inf here.
        anchor = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shrink = tl.exp2(best - anchor)
        weights = tl.exp2(scores * scale - anchor[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        best = higher
    return best, total, acc


@triton.jit(
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens", "query_blocks"]
)
def _prefill(
    q, layer_kv, page_table, query_starts, context_lens, query_blocks, sinks, out, scale, inner,
    window, table_row,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, PART_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(1) // PER_BLOCK
    seq = tl.load(query_blocks + 2 * block)
    # The last piece of a block sees the most keys, so it comes first.
    piece = PER_BLOCK - 1 - tl.program_id(1) % PER_BLOCK
    first_query = tl.load(query_blocks + 2 * block + 1) + piece * BLOCK_Q
    start = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - start
    if first_query >= num_queries:
        return
    context = tl.load(context_lens + seq)
    lowest = context - num_queries + first_query
    r = tl.arange(0, HEADS * BLOCK_Q)
    i = first_query + r % BLOCK_Q
    position = lowest + r % BLOCK_Q
    head = tl.program_id(0) * HEADS + r // BLOCK_Q
    d = tl.arange(0, HEAD_DIM)
    row = (start + i).to(tl.int64) * NUM_HEADS + head
    is_query = (i < num_queries)[:, None]
    query = tl.load(q + row[:, None] * HEAD_DIM + d[None, :], mask=is_query, other=0.0)
    best = tl.full((HEADS * BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS * BLOCK_Q,), tl.float32)
    if HAS_SINKS:
        best = tl.load(sinks + head).to(tl.float32) * log2_e
        total += 1.0
    acc = tl.zeros((HEADS * BLOCK_Q, HEAD_DIM), tl.float32)
    kv = layer_kv + tl.program_id(0) * HEADS // GROUP * HEAD_DIM
    table = page_table + seq * table_row
    end = tl.minimum(context, lowest + BLOCK_Q)
    begin, earliest = 0, 0
    whole_end = (lowest + 1) // BLOCK_T * BLOCK_T
    if HAS_WINDOW:
        earliest = tl.maximum(lowest + 1 - window, 0)
        begin = earliest // BLOCK_T * BLOCK_T
        whole = tl.cdiv(tl.maximum(lowest + BLOCK_Q - window, 0), BLOCK_T) * BLOCK_T
        whole = tl.minimum(whole, tl.cdiv(end, BLOCK_T) * BLOCK_T)
        best, total, acc = _over_tiles(
            query, best, total, acc, kv, table, position, begin, tl.minimum(whole, end), earliest,
            context, scale, inner, window, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, PART_STRIDE,
            TOKEN_STRIDE, BLOCK_T, HAS_CAP, True, True,
        )  # fmt: skip
        begin = whole
        whole_end = tl.maximum(whole_end, whole)
    best, total, acc = _over_tiles(
        query, best, total, acc, kv, table, position, begin, whole_end, earliest, context, scale,
        inner, window, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, PART_STRIDE, TOKEN_STRIDE, BLOCK_T,
        HAS_CAP, False, False,
    )  # fmt: skip
    best, total, acc = _over_tiles(
        query, best, total, acc, kv, table, position, whole_end, end, earliest, context, scale,
        inner, window, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, PART_STRIDE, TOKEN_STRIDE, BLOCK_T,
        HAS_CAP, True, False,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * HEAD_DIM + d[None, :], acc, mask=is_query)


def score_factors(scale: float, cap: float) -> tuple[float, float]:
    """The factor of scores for exp2, and the factor inside the tanh before it."""
    return (cap * LOG2_E, scale / cap) if cap else (scale * LOG2_E, 1.0)


def prefill_attention(
    q: Tensor,
    layer_kv: Tensor,
    segments: PrefillSegments,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    out: Tensor | None = None,
    tiling: PrefillTiling | None = None,
) -> Tensor:
    """Any number of queries per sequence, q [num_tokens, heads, head_dim]; causal."""
    plain = tiling is None and not cap
    if plain and triton_hopper.is_for(q, layer_kv, segments, window=window, sinks=sinks):
        return triton_hopper.prefill_attention(q, layer_kv, segments, scale, out=out)
    num_heads, head_dim = q.shape[1:]
    page_size, kv_heads = layer_kv.shape[2:4]
    group = num_heads // kv_heads
    cut = tiling or _tiling_for(q.dtype, head_dim, group)
    per_block = QUERY_BLOCK // cut.queries
    out = torch.empty_like(q) if out is None else out
    _prefill[(num_heads // cut.heads, segments.query_blocks.shape[0] * per_block)](
        q, layer_kv, segments.page_table, segments.query_starts, segments.context_lens,
        segments.query_blocks, q if sinks is None else sinks, out, *score_factors(scale, cap),
        window, segments.page_table.stride(0), NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim,
        PAGE_SIZE=page_size, PAGE_STRIDE=layer_kv.stride(0), PART_STRIDE=layer_kv.stride(1),
        TOKEN_STRIDE=layer_kv.stride(2), BLOCK_Q=cut.queries, HEADS=cut.heads,
        PER_BLOCK=per_block, BLOCK_T=cut.tokens,
        HAS_WINDOW=window > 0, HAS_SINKS=sinks is not None, HAS_CAP=cap > 0.0,
        num_warps=cut.num_warps, num_stages=2, maxnreg=cut.max_registers,
        **launch_options(q.device),
    )  # fmt: skip
    return out


def _tiling_for(dtype: torch.dtype, head_dim: int, group: int) -> PrefillTiling:
    """The fastest sizes on an H200; smaller if registers would not suffice."""
    if dtype == torch.float32:
        return PrefillTiling(queries=32 if head_dim <= 128 else 16, tokens=16, num_warps=4)
    if head_dim > 128:
        return PrefillTiling(queries=64, tokens=32, num_warps=4)
    heads = math.gcd(group, 2)
    return PrefillTiling(128 // heads, tokens=64, num_warps=8, heads=heads, max_registers=128)
