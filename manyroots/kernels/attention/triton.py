"""Paged attention in Triton: decode, split over the history; prefill is in `triton_prefill.py`.

Same signatures as `reference.py`. Reads exactly the tokens a query sees, so what lies in the rest
of a page never matters. Scores are kept in units of log2, because exp2 is what the chip has.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.attention.paged import Attending, DecodeRows, prepare
from manyroots.kernels.attention.triton_prefill import prefill_attention
from manyroots.kernels.launch import (
    counters,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)

__all__ = ["attend", "decode_attention", "prefill_attention", "prepare"]

LOG2_E = math.log2(math.e)
MAX_SPLITS = 16
FEW_PROGRAMS = 128
"""Fewer rows times heads than this leave a program alone on its multiprocessor, and it must hide
its own latency; with more, programs hide each other's, and small ones fit in greater number."""


@triton.jit
def _load_tokens(layer_kv, table, t, ok, d, page_stride, token_stride, PAGE_SIZE: tl.constexpr):
    """Offsets [tokens, head_dim] of keys; those of values are `part_stride` further."""
    page = tl.load(table + t // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
    at = page * page_stride + (t % PAGE_SIZE) * token_stride
    return layer_kv + at[:, None] + d[None, :]


@triton.jit
def _decode(
    q, layer_kv, page_table, context_lens, sinks, out, partial, sums, counters, scale, window,
    table_row, page_stride, part_stride, token_stride,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, GROUP_POW: tl.constexpr,
    HEAD_DIM: tl.constexpr, PREFETCH_LINES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, NUM_SPLITS: tl.constexpr, PAGES_AHEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One part of a row's history for the heads of a group; who is last merges the parts."""
    log2_e: tl.constexpr = 1.4426950408889634
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    let_next_begin(DEPENDENT)
    context = tl.load(context_lens + row)
    begin = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    per_split = tl.cdiv(tl.cdiv(context - begin, BLOCK_T), NUM_SPLITS) * BLOCK_T
    if begin + split * per_split >= context:
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
    # Asked for now, read after the wait: the newest token's are still to be written.
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
            # These pages were looked up a tile ago: their keys wait for no other load.
            token_at = page.to(tl.int64) * page_stride + t % PAGE_SIZE * token_stride
            page = tl.load(page_table + tl.minimum(t + BLOCK_T, last - 1) // PAGE_SIZE)
            keys_at = layer_kv + token_at[:, None] + d[None, :]
        else:
            keys_at = _load_tokens(
                layer_kv, page_table, t, ok, d, page_stride, token_stride, PAGE_SIZE
            )
        keys = tl.load(keys_at, mask=ok[:, None], other=0.0)
        values = tl.load(keys_at + part_stride, mask=ok[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(ok[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(
            weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee"
        )
        best = higher
    acc = acc / total[:, None]
    if num_used == 1:
        tl.store(out + row_head[:, None] * HEAD_DIM + d[None, :], acc, mask=(g < GROUP)[:, None])
    else:
        slot = row_head * NUM_SPLITS + split
        tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=(g < GROUP)[:, None])
        tl.store(sums + slot, best + tl.log2(total), mask=g < GROUP)
        # All of this program's stores, then the count: who counts last sees everybody's.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + row * NUM_KV + kv_head, 1, sem="acq_rel")
        if arrived == num_used - 1:
            tl.store(counters + row * NUM_KV + kv_head, 0)
            # Heads past the last are the last once more.
            mine = tl.minimum(tl.arange(0, GROUP_POW), GROUP - 1) + kv_head * GROUP
            _merge(
                partial, sums, out, row.to(tl.int64) * (NUM_KV * GROUP) + mine, num_used,
                NUM_SPLITS, GROUP_POW, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _merge(
    partial, sums, out, head, num_used,
    NUM_SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The parts of a group of heads into one: a few parts of every head at a time."""
    few: tl.constexpr = 4 if NUM_SPLITS > 4 else NUM_SPLITS
    s = tl.arange(0, NUM_SPLITS)
    all_sizes = tl.load(
        sums + head[:, None] * NUM_SPLITS + s[None, :], mask=(s < num_used)[None, :],
        other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    best = tl.max(all_sizes, axis=1)
    total = tl.sum(tl.exp2(all_sizes - best[:, None]), axis=1)
    d = tl.arange(0, HEAD_DIM)
    mixed = tl.zeros((GROUP, HEAD_DIM), tl.float32)
    for first in range(0, num_used, few):
        part = first + tl.arange(0, few)
        is_part = (part < num_used)[None, :]
        slot = head[:, None] * NUM_SPLITS + part[None, :]
        size = tl.load(sums + slot, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            partial + slot[:, :, None] * HEAD_DIM + d[None, None, :], mask=is_part[:, :, None],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        mixed += tl.sum(value * tl.exp2(size - best[:, None])[:, :, None], axis=1)
    tl.store(out + head[:, None] * HEAD_DIM + d[None, :], mixed / total[:, None])


def num_splits(num_rows: int, kv_heads: int, num_tiles: int = 0) -> int:
    """Into how many parts a history is cut at most: enough to fill the chip about four times, and
    no more than there are tiles in a window (0: no window)."""
    wanted = -(-4 * 132 // (num_rows * kv_heads))
    most = min(MAX_SPLITS, num_tiles or MAX_SPLITS)
    return 1 << (min(wanted, most) - 1).bit_length()


def attend(
    q: Tensor, layer_kv: Tensor, attending: Attending, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape. `sinks` [heads]
    are scores that take weight and give nothing."""
    out = torch.empty_like(q)
    count, window = attending.num_decodes, attending.window
    if attending.decodes is not None:
        decode_attention(
            q[:count], layer_kv, attending.decodes, scale, window=window, sinks=sinks,
            out=out[:count],
        )  # fmt: skip
    if attending.prompts is not None:
        prefill_attention(
            q[count:], layer_kv, attending.prompts, scale, window=window, sinks=sinks,
            out=out[count:],
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
    out: Tensor | None = None,
    splits: int | None = None,
    block_t: int | None = None,
) -> Tensor:
    """One query per row, q [num_rows, heads, head_dim]. A row sees its last `window` tokens (0:
    all). `sinks` [heads] are scores that take weight and give nothing."""
    num_rows, heads, head_dim = q.shape
    page_size, kv_heads = layer_kv.shape[2:4]
    group = heads // kv_heads
    is_few = num_rows * kv_heads < FEW_PROGRAMS
    num_warps, num_stages = (2, 2) if is_few else (1, 3)
    num_warps *= max(1, head_dim // 128)
    block_t = block_t or (32 if is_few else 16)
    splits = splits or num_splits(num_rows, kv_heads, triton.cdiv(window, block_t))
    out = torch.empty_like(q) if out is None else out
    shape = (num_rows * heads * splits,)
    # Not `scratch`: a captured graph keeps what it allocated, and a buffer that grows would not.
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode[(splits, kv_heads, num_rows)](
        q, layer_kv, rows.page_table, rows.context_lens, q if sinks is None else sinks, out,
        partial, sums, counters(q.device), scale * LOG2_E, window,
        rows.page_table.stride(0), layer_kv.stride(0), layer_kv.stride(1), layer_kv.stride(2),
        NUM_KV=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        GROUP_POW=triton.next_power_of_2(group), HEAD_DIM=head_dim,
        PREFETCH_LINES=max(1, head_dim * q.element_size() // 128), PAGE_SIZE=page_size,
        BLOCK_T=block_t, NUM_SPLITS=splits, PAGES_AHEAD=is_few,
        HAS_SINKS=sinks is not None, num_warps=num_warps, num_stages=num_stages,
        **launch_options(q.device),
    )  # fmt: skip
    return out
