"""Latent decode in Triton, split over the history: queries attend to latents directly.

Same signature as `reference.py`. Reads exactly the tokens that a row sees, so the rest of a page
never matters. A latent is loaded once and used as key and as value. Scores are in units of log2,
because the chip computes exp2. `triton_hopper.py` takes the inputs that it supports.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.latent import triton_hopper
from manyroots.kernels.latent.triton_rows import numbers_of, padded
from manyroots.kernels.launch import counters, launch_options, let_next_begin, wait_for_inputs

LOG2_E = math.log2(math.e)
MULTIPROCESSORS = 132
MOST_PARTS = 16
"""Most parts of a row."""
TOKENS = 32
"""Tokens of one iteration."""
LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    queries, pages, scales, page_table, lengths, out, partial, sums, counters, scale, table_row,
    page_stride, token_stride, scale_start,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_POW: tl.constexpr,
    ROPE_POW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
    NUM_SPLITS: tl.constexpr, IS_FP8: tl.constexpr, IS_CHOSEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend to one part of a row's history for a block of heads; the last program merges the
    parts. `IS_CHOSEN`: the table has a slot for each token, and this step made it."""
    let_next_begin(DEPENDENT)
    split, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_CHOSEN:
        wait_for_inputs(DEPENDENT)
    length = tl.load(lengths + row)
    per_split = tl.cdiv(tl.cdiv(length, BLOCK_T), NUM_SPLITS) * BLOCK_T
    first = split * per_split
    h = block * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, LATENT_POW)
    is_head = h < HEADS
    is_out = is_head[:, None] & (d < LATENT)[None, :]
    row_head = row.to(tl.int64) * HEADS + h
    if not IS_CHOSEN:
        wait_for_inputs(DEPENDENT)
    if first >= length:
        if split == 0:  # a row without tokens
            nothing = tl.zeros((BLOCK_H, LATENT_POW), tl.float32)
            tl.store(out + row_head[:, None] * LATENT + d[None, :], nothing, mask=is_out)
        return
    last = tl.minimum(length, first + per_split)
    num_used = tl.cdiv(length, per_split)
    query_at = queries + row_head[:, None] * (LATENT + ROPE)
    query = tl.load(query_at + d[None, :], mask=is_out, other=0.0)
    e = tl.arange(0, ROPE_POW)
    is_rope = is_head[:, None] & (e < ROPE)[None, :]
    query_rope = tl.load(query_at + LATENT + e[None, :], mask=is_rope, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, LATENT_POW), tl.float32)
    table = page_table + row.to(tl.int64) * table_row
    for begin in range(first, last, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        ok = t < last
        if IS_CHOSEN:
            slot = tl.load(table + t, mask=ok, other=0)
            at = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * token_stride
        else:
            page = tl.load(table + t // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            at = page * page_stride + t % PAGE_SIZE * token_stride
        seen = ok[:, None] & (d < LATENT)[None, :]
        latents = tl.load(pages + at[:, None] + d[None, :], mask=seen, other=0.0).to(query.dtype)
        seen = ok[:, None] & (e < ROPE)[None, :]
        rotated = tl.load(pages + at[:, None] + LATENT + e[None, :], mask=seen, other=0.0)
        scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
        # FP8 numbers are multiplied directly: scaling them first would round them again.
        if IS_FP8:
            scale_at = scales + at // 4 + scale_start
            latent_scale = tl.load(scale_at, mask=ok, other=0.0)[None, :]
            rope_scale = tl.load(scale_at + 1, mask=ok, other=0.0)[None, :]
            turned = tl.trans(rotated.to(query.dtype))
            scores *= latent_scale
            scores += tl.dot(query_rope, turned, input_precision="ieee") * rope_scale
        else:
            scores = tl.dot(query_rope, tl.trans(rotated), scores, input_precision="ieee")
        scores = tl.where(ok[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_FP8:
            weights *= latent_scale
        acc = tl.dot(
            weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee"
        )
        best = higher
    acc = acc / total[:, None]
    if num_used == 1:
        tl.store(out + row_head[:, None] * LATENT + d[None, :], acc, mask=is_out)
    else:
        slot = row_head * NUM_SPLITS + split
        tl.store(partial + slot[:, None] * LATENT + d[None, :], acc, mask=is_out)
        tl.store(sums + slot, best + tl.log2(total), mask=is_head)
        # Store all results of this program, then count: the last to count sees every part.
        tl.debug_barrier()
        counter = counters + row * tl.num_programs(1) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_used - 1:
            tl.store(counter, 0)
            best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            acc = tl.zeros((BLOCK_H, LATENT_POW), tl.float32)
            for part in range(num_used):
                slot = row_head * NUM_SPLITS + part
                size = tl.load(sums + slot, mask=is_head, other=0.0, cache_modifier=".cg")
                value = tl.load(
                    partial + slot[:, None] * LATENT + d[None, :], mask=is_out, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                higher = tl.maximum(best, size)
                shrink, weight = tl.exp2(best - higher), tl.exp2(size - higher)
                acc = acc * shrink[:, None] + value * weight[:, None]
                total = total * shrink + weight
                best = higher
            acc = acc / total[:, None]
            tl.store(out + row_head[:, None] * LATENT + d[None, :], acc, mask=is_out)


def latent_decode(
    queries: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float, latent: int
) -> Tensor:
    """Attended latents [rows, heads, latent] of queries [rows, heads, latent + rope], each row over
    its first `lengths` tokens. A row without tokens gives zeros."""
    if triton_hopper.is_for(queries, pages, latent):
        return triton_hopper.latent_decode(queries, pages, page_table, lengths, scale, latent)
    return _attend(queries, pages, page_table, lengths, scale, latent, is_chosen=False)


def attend_chosen(
    queries: Tensor, pages: Tensor, slots: Tensor, scale: float, latent: int
) -> Tensor:
    """The same, each row over the tokens at its `slots` [rows, most], -1 for none, after all
    others. A row without tokens gives zeros."""
    lengths = (slots >= 0).sum(1, dtype=torch.int32)
    return _attend(queries, pages, slots, lengths, scale, latent, is_chosen=True)


def _attend(
    queries: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    latent: int,
    *,
    is_chosen: bool,
) -> Tensor:
    queries = queries.contiguous()
    num_rows, heads, width = queries.shape
    device = queries.device
    block = min(16 if queries.dtype == torch.float32 else 32, padded(heads, LEAST))
    blocks = -(-heads // block)
    # Enough parts to fill the chip about four times.
    parts = min(MOST_PARTS, padded(-(-4 * MULTIPROCESSORS // (num_rows * blocks))))
    out = torch.empty(num_rows, heads, latent, dtype=queries.dtype, device=device)
    # Not `scratch`: a captured graph keeps its allocations, and a growing buffer would move.
    partial = torch.empty(num_rows * heads * parts, latent, dtype=torch.float32, device=device)
    sums = torch.empty(num_rows * heads * parts, dtype=torch.float32, device=device)
    numbers, scales, scale_start = numbers_of(pages)
    _decode[(parts, blocks, num_rows)](
        queries, numbers, scales, table, lengths, out, partial, sums, counters(device),
        scale * LOG2_E, table.stride(0), pages.stride(0), pages.stride(1), scale_start,
        HEADS=heads, LATENT=latent, ROPE=width - latent, LATENT_POW=padded(latent, LEAST),
        ROPE_POW=padded(width - latent, LEAST), PAGE_SIZE=pages.shape[1], BLOCK_H=block,
        BLOCK_T=16 if queries.dtype == torch.float32 else TOKENS, NUM_SPLITS=parts,
        IS_FP8=pages.dtype is torch.uint8, IS_CHOSEN=is_chosen, num_warps=4 if block <= 16 else 8,
        num_stages=2, **launch_options(device),
    )  # fmt: skip
    return out
