"""Attention to a window of tokens and to entries of groups in Triton, for decodes and prompts.

Same signature as `reference.py`. A program has one query's heads, or a block of them, and a part of
the rows that the query sees: tokens of its window first, then entries, all or those chosen. A row
is loaded once and used as key and as value. The last program of a query merges its parts and adds
the sinks. Scores are in units of log2, because the chip computes exp2. Queries that need no parts
are computed by `triton_hopper.py` where it can.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.compressed import triton_hopper
from manyroots.kernels.compressed.inputs import KeyRows
from manyroots.kernels.compressed.triton_rows import rotate_last
from manyroots.kernels.latent.triton_decode import LEAST, LOG2_E, MULTIPROCESSORS
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import (
    counters,
    has_shared_memory,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable

MOST_PARTS = 16
"""Most parts of the rows that a query sees."""
TOKENS, TOKENS_OF_MANY = 32, 64
"""Rows of one iteration; and where queries alone fill a chip with room for them."""
HEADS = 64
"""Most heads of a program."""


@triton.jit
def _seen(
    query, rows, ok, d, scale, best, total, acc, DIM: tl.constexpr
):  # fmt: skip
    """The state of a softmax after some more rows, of pointers `rows`."""
    mask = ok[:, None] & (d < DIM)[None, :]
    values = tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(values), input_precision="ieee") * scale
    scores = tl.where(ok[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    shrink = tl.exp2(best - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _attend(
    q, keys, entries, chosen, sinks, key_table, entry_table, seqs, lens, out, partial, sums,
    counters, scale, log2_e, key_table_row, entry_table_row, key_page, key_row, entry_page,
    entry_row, chosen_row, most, q_row, q_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, IS_CHOSEN: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr, NUM_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`GROUP`: tokens of an entry; 0 without entries. `most`: entries that a query chooses."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    split, block, token = tl.program_id(1), tl.program_id(2), tl.program_id(0).to(tl.int64)
    length = tl.load(lens + token)
    seq = tl.load(seqs + token).to(tl.int64)
    first = 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    num_entries = 0
    if GROUP:
        num_entries = length // GROUP
        if IS_CHOSEN:
            num_entries = tl.minimum(num_entries, most)
    key_blocks = tl.cdiv(length - first, BLOCK_T)
    num_blocks = key_blocks + tl.cdiv(num_entries, BLOCK_T)
    per_split = tl.maximum(tl.cdiv(num_blocks, NUM_SPLITS), 1)
    begin = split * per_split
    if begin >= num_blocks and split > 0:
        return
    end = tl.minimum(begin + per_split, num_blocks)
    h = block * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, DIM_POW)
    is_head = h < HEADS
    is_out = is_head[:, None] & (d < DIM)[None, :]
    query_at = q + token * q_row + h * q_head
    query = tl.load(query_at[:, None] + d[None, :], mask=is_out, other=0.0)
    best = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, DIM_POW), tl.float32)
    table = key_table + seq * key_table_row
    for part in range(begin, tl.minimum(end, key_blocks)):
        t = first + part * BLOCK_T + tl.arange(0, BLOCK_T)
        ok = t < length
        page = tl.load(table + t // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
        rows = keys + page * key_page + (t % PAGE_SIZE).to(tl.int64) * key_row
        best, total, acc = _seen(query, rows, ok, d, scale, best, total, acc, DIM)
    if GROUP:
        table = entry_table + seq * entry_table_row
        for part in range(tl.maximum(begin, key_blocks), end):
            n = (part - key_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
            ok = n < num_entries
            if IS_CHOSEN:
                n = tl.load(chosen + token * chosen_row + n, mask=ok, other=0).to(tl.int32)
            page = tl.load(table + n // (PAGE_SIZE // GROUP), mask=ok, other=0).to(tl.int64)
            rows = entries + page * entry_page + (n % (PAGE_SIZE // GROUP)).to(tl.int64) * entry_row
            best, total, acc = _seen(query, rows, ok, d, scale, best, total, acc, DIM)
    sink = tl.load(sinks + h, mask=is_head, other=0.0) * log2_e
    row_head = token * HEADS + h
    num_used = tl.cdiv(num_blocks, per_split)
    if num_used <= 1:
        higher = tl.maximum(best, sink)
        shrink = tl.exp2(best - higher)
        whole = acc * (shrink / (total * shrink + tl.exp2(sink - higher)))[:, None]
        whole = whole.to(out.dtype.element_ty)
        tl.store(out + row_head[:, None] * DIM + d[None, :], whole, mask=is_out)
    else:
        slot = row_head * NUM_SPLITS + split
        own = acc / total[:, None]
        tl.store(partial + slot[:, None] * DIM + d[None, :], own, mask=is_out)
        tl.store(sums + slot, best + tl.log2(total), mask=is_head)
        # Store all results of this program, then count: the last to count sees every part.
        tl.debug_barrier()
        counter = counters + token * tl.num_programs(2) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_used - 1:
            tl.store(counter, 0)
            highest = sink
            all_of = tl.full((BLOCK_H,), 1.0, tl.float32)
            joined = tl.zeros((BLOCK_H, DIM_POW), tl.float32)
            for part in range(num_used):
                slot = row_head * NUM_SPLITS + part
                size = tl.load(sums + slot, mask=is_head, other=0.0, cache_modifier=".cg")
                value = tl.load(
                    partial + slot[:, None] * DIM + d[None, :], mask=is_out, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                higher = tl.maximum(highest, size)
                shrink, weight = tl.exp2(highest - higher), tl.exp2(size - higher)
                joined = joined * shrink[:, None] + value * weight[:, None]
                all_of = all_of * shrink + weight
                highest = higher
            merged = (joined / all_of[:, None]).to(out.dtype.element_ty)
            tl.store(out + row_head[:, None] * DIM + d[None, :], merged, mask=is_out)


def attend_rows(
    q: Tensor,
    keys: KeyRows,
    entries: KeyRows | None,
    chosen: Tensor | None,
    sinks: Tensor,
    scale: float,
    angles: RopeTable,
) -> Tensor:
    """What queries [tokens, heads, dim] attend to: keys of their windows, and entries, all or those
    chosen. A row is key and value, so values are rotated; the result is rotated back by each
    query's own `angles`. `sinks` [heads] take weight and give nothing."""
    num_tokens, heads, dim = q.shape
    device, is_exact = q.device, q.dtype == torch.float32
    block = min(16 if is_exact else HEADS, padded(heads, LEAST))
    blocks = -(-heads // block)
    # Enough parts to fill the chip about twice.
    parts = min(MOST_PARTS, padded(-(-2 * MULTIPROCESSORS // (num_tokens * blocks))))
    if parts == 1 and triton_hopper.is_for(q, keys, entries, angles):
        return triton_hopper.attend_rows(q, keys, entries, chosen, sinks, scale, angles)
    is_many = parts == 1 and has_shared_memory(device)
    rows = 16 if is_exact else TOKENS_OF_MANY if is_many else TOKENS
    out = torch.empty(num_tokens, heads, dim, dtype=q.dtype, device=device)
    # Not `scratch`: a captured graph keeps its allocations, and a growing buffer would move.
    count = num_tokens * heads * parts if parts > 1 else 1
    partial = torch.empty(count, dim, dtype=torch.float32, device=device)
    sums = torch.empty(count, dtype=torch.float32, device=device)
    step, second = keys.step, keys if entries is None else entries
    _attend[(num_tokens, parts, blocks)](
        q, keys.pages, second.pages, step.token_seqs if chosen is None else chosen, sinks,
        step.page_table, second.step.page_table, step.token_seqs, step.token_lens, out, partial,
        sums, counters(device), scale * LOG2_E, LOG2_E, step.page_table.stride(0),
        second.step.page_table.stride(0), *keys.pages.stride()[:2], *second.pages.stride()[:2],
        *((0, 0) if chosen is None else (chosen.stride(0), chosen.shape[1])), *q.stride()[:2],
        HEADS=heads, DIM=dim, DIM_POW=padded(dim, LEAST), WINDOW=keys.window or 0,
        PAGE_SIZE=step.page_size, GROUP=0 if entries is None else entries.step.group,
        IS_CHOSEN=chosen is not None, BLOCK_H=block, BLOCK_T=rows,
        NUM_SPLITS=parts, num_warps=4 if block <= 16 else 8, num_stages=2,
        **launch_options(device),
    )  # fmt: skip
    return rotate_last(out, angles, back=True)
