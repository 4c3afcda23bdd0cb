"""Paged attention in Triton. This module splits decoding over the history; prefill is in
`triton_prefill.py`, and tokens that follow each other in one sequence in `triton_runs.py`.

Same signatures as `reference.py`. Reads exactly the tokens that a query sees, so the rest of a page
never matters. Scores are in units of log2, because the chip computes exp2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.attention.paged import MEMBERS, DecodeRows, PreparedAttention, prepare
from manyroots.kernels.attention.triton_merge import merge_parts
from manyroots.kernels.attention.triton_prefill import prefill_attention, score_factors
from manyroots.kernels.attention.triton_runs import decode_runs
from manyroots.kernels.launch import (
    counters,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.row_sizes import row_size

__all__ = ["attend", "decode_attention", "prefill_attention", "prepare"]

LOG2_E = math.log2(math.e)
MOST_PARTS = 16
"""Most parts of a row's history."""
BLOCK_T = 32
"""Tokens that a program reads in one iteration."""
SHARED_PARTS = 4
"""Most parts of a shared prefix."""
SHARED_STEP = 64
MAX_SHARED_QUERIES = 64
"""Rows times heads of a program that reads a shared prefix."""
FEW_PROGRAMS = 256
"""With fewer rows times heads, a program is alone on its multiprocessor and must hide its own
latency. With more, programs hide each other's latency, and more small programs fit."""
TWO_PARTS_FIT = 264
"""Up to this many rows times heads, a chip has room for two programs each that load three tiles
ahead."""


@triton.jit
def _load_tokens(layer_kv, table, t, ok, d, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Offsets [tokens, head_dim] of keys; those of values are `part_stride` further."""
    page = tl.load(table + t // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
    at = page * page_stride + (t % PAGE_SIZE) * token_stride
    return layer_kv + at[:, None] + d[None, :]


@triton.jit
def _take_in(
    query, keys_at, part_stride, ok, best, total, acc, scale, inner, HAS_CAP: tl.constexpr
):
    """Accumulate the tokens at `keys_at` that are `ok` (at least one is) into the best score, the
    sum of weights and the sum of values."""
    keys = tl.load(keys_at, mask=ok[:, None], other=0.0).to(query.dtype)
    values = tl.load(keys_at + part_stride, mask=ok[:, None], other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HAS_CAP:
        scores = 2.0 * tl.sigmoid(2.0 * inner * scores) - 1.0  # tanh(inner * scores)
    scores = tl.where(ok[None, :], scores * scale, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _decode(
    q, layer_kv, page_table, context_lens, shared_lens, order, sinks, out, partial, sums, counters,
    scale, inner, window, table_row, page_stride, part_stride, token_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, GROUP_POW: tl.constexpr,
    HEAD_DIM: tl.constexpr, PREFETCH_LINES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, NUM_SPLITS: tl.constexpr, PAGES_AHEAD: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
    NUM_SHARED: tl.constexpr, SHARED_STEP: tl.constexpr, MAX_PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a row's history for the heads of a group. The last program of a row
    merges the parts, including those that `_shared` computed."""
    log2_e: tl.constexpr = 1.4426950408889634
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    if HAS_ORDER:
        row = tl.load(order + row)
    let_next_begin(DEPENDENT)
    context = tl.load(context_lens + row)
    begin = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    num_before = 0
    if NUM_SHARED > 0:
        begin = tl.load(shared_lens + row)
        num_before = num_shared_parts(begin, NUM_SHARED, SHARED_STEP)
    per_split = tl.cdiv(tl.cdiv(context - begin, BLOCK_T), NUM_SPLITS) * BLOCK_T
    if begin + split * per_split >= context:
        # Wait for the kernels before this one. The next kernel waits only for this one, so it
        # relies on this wait even if no row decodes.
        wait_for_inputs(DEPENDENT)
        return
    num_used = tl.cdiv(context - begin, per_split)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_DIM)
    first = begin + split * per_split
    last = tl.minimum(context, first + per_split)
    layer_kv += kv_head * HEAD_DIM
    page_table += row * table_row
    early = tl.minimum(first + tl.arange(0, BLOCK_T), last - 1)
    page = tl.load(page_table + early // PAGE_SIZE)
    # Loaded now and read after the wait: the newest token's page entry is not written yet.
    lines = tl.arange(0, PREFETCH_LINES) * (HEAD_DIM // PREFETCH_LINES)
    early_at = page.to(tl.int64) * page_stride + early % PAGE_SIZE * token_stride
    prefetch(layer_kv + early_at[:, None] + lines[None, :], DEPENDENT)
    prefetch(layer_kv + part_stride + early_at[:, None] + lines[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)
    head = kv_head * GROUP + g
    row_head = row.to(tl.int64) * (NUM_KV * GROUP) + head
    query = tl.load(
        q + row_head[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None], other=0.0
    )
    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_DIM), tl.float32)
    if HAS_SINKS:
        if split == 0:
            best = tl.load(sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * log2_e
            total += 1.0
    for at in range(first, last, BLOCK_T):
        t = at + tl.arange(0, BLOCK_T)
        ok = t < last
        if PAGES_AHEAD:
            # These pages were looked up one tile ago, so their keys wait for no other load.
            token_at = page.to(tl.int64) * page_stride + t % PAGE_SIZE * token_stride
            page = tl.load(page_table + tl.minimum(t + BLOCK_T, last - 1) // PAGE_SIZE)
            keys_at = layer_kv + token_at[:, None] + d[None, :]
        else:
            keys_at = _load_tokens(
                layer_kv, page_table, t, ok, d, page_stride, token_stride, PAGE_SIZE
            )
        best, total, acc = _take_in(
            query, keys_at, part_stride, ok, best, total, acc, scale, inner, HAS_CAP
        )
    acc = acc / total[:, None]
    if num_before + num_used == 1:
        tl.store(out + row_head[:, None] * HEAD_DIM + d[None, :], acc, mask=(g < GROUP)[:, None])
    else:
        slot = row_head * MAX_PARTS + num_before + split
        tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=(g < GROUP)[:, None])
        tl.store(sums + slot, best + tl.log2(total), mask=g < GROUP)
        # Store all results, then count: the program that counts last sees all results.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + row * NUM_KV + kv_head, 1, sem="acq_rel")
        if arrived == num_used - 1:
            tl.store(counters + row * NUM_KV + kv_head, 0)
            # Heads past the last repeat the last head.
            mine = tl.minimum(tl.arange(0, GROUP_POW), GROUP - 1) + kv_head * GROUP
            merge_parts(
                partial, sums, out, row.to(tl.int64) * (NUM_KV * GROUP) + mine,
                num_before + num_used, MAX_PARTS, GROUP_POW, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def per_shared_part(num_tokens, NUM_SHARED: tl.constexpr, SHARED_STEP: tl.constexpr):
    """Tokens of a shared prefix that one program takes."""
    return tl.cdiv(tl.cdiv(num_tokens, SHARED_STEP), NUM_SHARED) * SHARED_STEP


@triton.jit
def num_shared_parts(num_tokens, NUM_SHARED: tl.constexpr, SHARED_STEP: tl.constexpr):
    """Number of parts of a shared prefix; 0 if there is none."""
    each = per_shared_part(num_tokens, NUM_SHARED, SHARED_STEP)
    return tl.cdiv(num_tokens, tl.maximum(each, 1))


@triton.jit
def _shared(
    q, layer_kv, page_table, members, blocks, partial, sums, scale, inner, table_row, page_stride,
    part_stride, token_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_POW: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MEMBERS: tl.constexpr, BLOCK_M: tl.constexpr,
    NUM_SHARED: tl.constexpr, SHARED_STEP: tl.constexpr, MAX_PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a shared prefix for the heads of a group of each of its rows."""
    let_next_begin(DEPENDENT)
    # Wait before any program exits: the next kernel waits only for this one.
    wait_for_inputs(DEPENDENT)
    split, kv_head = tl.program_id(0), tl.program_id(1)
    pieces: tl.constexpr = MEMBERS * GROUP_POW // BLOCK_M
    block, piece = tl.program_id(2) // pieces, tl.program_id(2) % pieces
    start = tl.load(blocks + 3 * block)
    count = tl.load(blocks + 3 * block + 1)
    num_tokens = tl.load(blocks + 3 * block + 2)
    each = per_shared_part(num_tokens, NUM_SHARED, SHARED_STEP)
    first = split * each
    if (piece * (BLOCK_M // GROUP_POW) >= count) | (first >= num_tokens):
        return
    last = tl.minimum(num_tokens, first + each)
    i = piece * BLOCK_M + tl.arange(0, BLOCK_M)
    member, g = i // GROUP_POW, i % GROUP_POW
    ok = (member < count) & (g < GROUP)
    row = tl.load(members + start + member, mask=ok, other=0).to(tl.int64)
    row_head = row * (NUM_KV * GROUP) + kv_head * GROUP + g
    d = tl.arange(0, HEAD_DIM)
    query = tl.load(q + row_head[:, None] * HEAD_DIM + d[None, :], mask=ok[:, None], other=0.0)
    # All rows have these pages; read the first row's table.
    page_table += tl.load(members + start).to(tl.int64) * table_row
    layer_kv += kv_head * HEAD_DIM
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for at in range(first, last, SHARED_STEP):
        t = at + tl.arange(0, SHARED_STEP)
        seen = t < last
        keys_at = _load_tokens(
            layer_kv, page_table, t, seen, d, page_stride, token_stride, PAGE_SIZE
        )
        best, total, acc = _take_in(
            query, keys_at, part_stride, seen, best, total, acc, scale, inner, HAS_CAP
        )
    slot = row_head * MAX_PARTS + split
    to = partial + slot[:, None] * HEAD_DIM + d[None, :]
    tl.store(to, acc / total[:, None], mask=ok[:, None])
    tl.store(sums + slot, best + tl.log2(total), mask=ok)


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Tile sizes for histories; found by measurement."""

    parts: int
    """Most parts of a row."""
    tokens: int
    """Tokens of one iteration."""
    num_warps: int
    num_stages: int
    pages_ahead: bool
    """Whether pages are looked up one tile before they are read."""


def tiling_for(
    num_rows: int, kv_heads: int, head_dim: int, window: int, is_half: bool
) -> DecodeTiling:
    """The fastest sizes on an H200. `is_half`: queries and pages share a dtype of two bytes."""
    count = row_size(num_rows) * kv_heads
    wide = max(1, head_dim // 128)
    if FEW_PROGRAMS <= count <= TWO_PARTS_FIT and is_half and wide == 1:
        return DecodeTiling(_num_parts(2, window, BLOCK_T), BLOCK_T, 1, 4, pages_ahead=True)
    # Enough parts to fill the chip about four times.
    parts = _num_parts(-(-4 * 132 // count), window, BLOCK_T)
    if count < FEW_PROGRAMS:
        return DecodeTiling(parts, BLOCK_T, 2 * wide, 2, pages_ahead=True)
    return DecodeTiling(parts, BLOCK_T, wide, 3, pages_ahead=False)


def _num_parts(wanted: int, window: int, tokens: int) -> int:
    """A power of two, at most the number of tiles in a window (0: no window)."""
    most = min(MOST_PARTS, triton.cdiv(window, tokens) or MOST_PARTS)
    return 1 << (min(wanted, most) - 1).bit_length()


def attend(
    q: Tensor,
    layer_kv: Tensor,
    metadata: PreparedAttention,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape. `sinks` [heads]
    are scores that take weight and add no value. With a `cap` (0: none), a score s becomes cap *
    tanh(s / cap)."""
    # Rows of no sequence are zero, because a later layer may route tokens by their values.
    out = torch.zeros_like(q) if metadata.is_padded else torch.empty_like(q)
    count, window = metadata.num_decodes, metadata.window
    if metadata.decodes is not None:
        decode = decode_attention if metadata.decodes.runs is None else decode_runs
        decode(
            q[:count], layer_kv, metadata.decodes, scale, window=window, sinks=sinks,
            cap=cap, out=out[:count],
        )  # fmt: skip
    if metadata.prompts is not None:
        prefill_attention(
            q, layer_kv, metadata.prompts, scale, window=window, sinks=sinks, cap=cap,
            out=out,
        )  # fmt: skip
    return out


def decode_attention(
    q: Tensor,
    layer_kv: Tensor,
    rows: DecodeRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    out: Tensor | None = None,
    tiling: DecodeTiling | None = None,
) -> Tensor:
    """One query per row, q [num_rows, heads, head_dim]. A row sees its last `window` tokens (0:
    all). `sinks` [heads] are scores that take weight and add no value."""
    num_rows, heads, head_dim = q.shape
    page_size, kv_heads = layer_kv.shape[2:4]
    group = heads // kv_heads
    is_half = q.dtype == layer_kv.dtype and q.element_size() == 2
    cut = tiling or tiling_for(num_rows, kv_heads, head_dim, window, is_half)
    out = torch.empty_like(q) if out is None else out
    shared = rows.shared
    num_shared = 0 if shared is None else SHARED_PARTS
    max_parts = triton.next_power_of_2(cut.parts + num_shared)
    shape = (num_rows * heads * max_parts,)
    # Not `scratch`: a captured graph keeps its allocations, and a growing buffer would move.
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    group_pow = triton.next_power_of_2(group)
    factors = score_factors(scale, cap)
    strides = (rows.page_table.stride(0), *(layer_kv.stride(i) for i in range(3)))
    sizes = {
        "NUM_KV": kv_heads, "GROUP": group, "GROUP_POW": group_pow, "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size, "NUM_SHARED": num_shared, "MAX_PARTS": max_parts,
        "SHARED_STEP": SHARED_STEP, "HAS_CAP": cap > 0.0, **launch_options(q.device),
    }  # fmt: skip
    if shared is not None:
        # At least what a matrix instruction takes, at most what registers hold.
        block_m = max(16, min(MAX_SHARED_QUERIES, MEMBERS * group_pow))
        pieces = MEMBERS * group_pow // block_m
        _shared[(SHARED_PARTS, kv_heads, shared.blocks.shape[0] * pieces)](
            q, layer_kv, rows.page_table, shared.members, shared.blocks, partial, sums,
            *factors, *strides, MEMBERS=MEMBERS, BLOCK_M=block_m, num_warps=4,
            num_stages=2, **sizes,
        )  # fmt: skip
    _decode[(cut.parts, kv_heads, num_rows)](
        q, layer_kv, rows.page_table, rows.context_lens,
        rows.context_lens if shared is None else shared.lens,
        rows.context_lens if rows.order is None else rows.order, q if sinks is None else sinks, out,
        partial, sums, counters(q.device), *factors, window, *strides,
        GROUP_PAD=max(16, group_pow),
        PREFETCH_LINES=max(1, head_dim * layer_kv.element_size() // 128),
        BLOCK_T=cut.tokens, NUM_SPLITS=cut.parts, PAGES_AHEAD=cut.pages_ahead,
        HAS_ORDER=rows.order is not None, HAS_SINKS=sinks is not None, num_warps=cut.num_warps,
        num_stages=cut.num_stages, **sizes,
    )  # fmt: skip
    return out
