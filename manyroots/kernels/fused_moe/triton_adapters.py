"""Adapters of experts in Triton, for few tokens: further programs of `both_products`.

A decode has about one pair per adapter and expert. So a program computes B A x of one pair: of gate
or of up before the tiles of the first product, of down before those of the second. It only reads
weights, in large pieces. The tiles add what it stored (`deltas`), for all of their pairs at once.

Nothing is gathered or copied; pairs that share a matrix find it in the cache. Pairs of many tokens
share matrices: see `triton_tile_adapters.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.fused_moe.adapters import PART_WIDTH
from manyroots.kernels.launch import wait_for_count, wait_for_inputs

RANK_BLOCK = tl.constexpr(16)
"""Ranks that are multiplied at once."""
_PART_WIDTH = tl.constexpr(PART_WIDTH)


@triton.jit
def _first_half(table, slot, part, k_size, NUM_PARTS: tl.constexpr, IS_SHARED: tl.constexpr):
    """A slot's part: its A, the distance to the next expert's, and its rank (0 without an
    adapter). IS_SHARED: in the table of a `LinearSite`."""
    known = tl.maximum(slot, 0)
    if IS_SHARED:
        entry = table + known * (2 + 3 * NUM_PARTS)
        a = tl.load(entry) + tl.load(entry + 2 + 3 * part) * k_size
        step = tl.zeros_like(a)
        rank = tl.load(entry + 3 + 3 * part)
    else:
        entry = table + (known * NUM_PARTS + part) * _PART_WIDTH
        a, step = tl.load(entry), tl.load(entry + 1)
        rank = tl.load(entry + 2)
    return a, step, tl.where(slot >= 0, rank.to(tl.int32), 0)


@triton.jit
def _second_half(table, slot, part, NUM_PARTS: tl.constexpr, IS_SHARED: tl.constexpr):
    """The same of its B."""
    known = tl.maximum(slot, 0)
    if IS_SHARED:
        entry = table + known * (2 + 3 * NUM_PARTS) + 3 + 3 * part
        rank, b = tl.load(entry), tl.load(entry + 1)
        step = tl.zeros_like(b)
    else:
        entry = table + (known * NUM_PARTS + part) * _PART_WIDTH + 2
        rank, b, step = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    return b, step, tl.multiple_of(tl.where(slot >= 0, rank.to(tl.int32), 0), 8)


@triton.jit
def _row_delta(x, a, b, rank, scale, out, k_size, n_size, COLUMNS: tl.constexpr):
    """out[n_size] = B (scale * A x) of one row x[k_size], in float32; zeros if `rank` is 0."""
    i = tl.arange(0, COLUMNS)
    if rank == 0:
        for at in range(0, n_size, COLUMNS):
            tl.store(out + at + i, tl.zeros((COLUMNS,), tl.float32), mask=at + i < n_size)
    for first in range(0, rank, RANK_BLOCK):
        r = first + tl.arange(0, RANK_BLOCK)
        h = tl.zeros((RANK_BLOCK,), tl.float32)
        for at in range(0, k_size, COLUMNS):
            k = at + i
            ok = (r < rank)[:, None] & (k < k_size)[None, :]
            weight = tl.load(a + r[:, None] * k_size + k[None, :], mask=ok, other=0.0)
            # Past the first-level cache, which does not see other programs' writes.
            row = tl.load(x + k, mask=k < k_size, other=0.0, cache_modifier=".cg")
            h += tl.sum(weight.to(tl.float32) * row.to(tl.float32)[None, :], axis=1)
        h *= scale
        for at in range(0, n_size, COLUMNS):
            n = at + i
            ok = (n < n_size)[:, None] & (r < rank)[None, :]
            weight = tl.load(b + n[:, None] * rank + r[None, :], mask=ok, other=0.0)
            value = tl.sum(weight.to(tl.float32) * h[None, :], axis=1)
            if first > 0:
                value += tl.load(out + n, mask=n < n_size, other=0.0, cache_modifier=".cg")
            tl.store(out + n, value, mask=n < n_size)
        # The next ranks are added to what other threads may have stored.
        tl.debug_barrier()


@triton.jit
def up_pair(
    x, delta, slots, experts, pool, table, scalings, part, pair, top_k, n_size, k_size,
    IS_SHARED: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """B A x of one pair, of gate (`part` 0) or up (1). IS_SHARED: of the block that every token
    goes through, whose pairs are the tokens."""
    token = pair // top_k
    slot = tl.load(slots + token).to(tl.int64)
    a, a_step, rank = _first_half(table, slot, part, k_size, 2, IS_SHARED)
    b, b_step, rank = _second_half(table, slot, part, 2, IS_SHARED)
    scale = tl.load(scalings + tl.maximum(slot, 0) * 2 + part)
    wait_for_inputs(DEPENDENT)
    if not IS_SHARED:
        expert = tl.load(experts + pair)
        a += expert * a_step
        b += expert * b_step
    a = pool + tl.multiple_of(a, 8)
    b = pool + tl.multiple_of(b, 8)
    to = delta + (pair.to(tl.int64) * 2 + part) * n_size
    row = x + token.to(tl.int64) * k_size
    _row_delta(row, a, b, rank, scale, to, k_size, n_size, COLUMNS)


@triton.jit
def down_pair(
    inner, delta, counter, count, slots, pool, table, scalings, expert, pair, top_k, n_size, k_size,
    IS_SHARED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """B A of the activations of one pair, which are stored when `counter` has `count`."""
    slot = tl.load(slots + pair // top_k).to(tl.int64)
    a, a_step, rank = _first_half(table, slot, 0, k_size, 1, IS_SHARED)
    b, b_step, rank = _second_half(table, slot, 0, 1, IS_SHARED)
    scale = tl.load(scalings + tl.maximum(slot, 0))
    if not IS_SHARED:
        a += expert * a_step
        b += expert * b_step
    a = pool + tl.multiple_of(a, 8)
    b = pool + tl.multiple_of(b, 8)
    wait_for_count(counter, count)
    row, to = inner + pair * k_size, delta + pair * n_size
    _row_delta(row, a, b, rank, scale, to, k_size, n_size, COLUMNS)


@triton.jit
def deltas(delta, stride, pair, is_pair, n, n_size):
    """The deltas of a tile's pairs at `n`, as stored by earlier programs: [n, pairs]."""
    ok = is_pair[:, None] & (n < n_size)[None, :]
    at = delta + pair[:, None] * stride + n[None, :]
    return tl.trans(tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"))


@triton.jit
def add_to_scores(
    scores, hidden, slots, pool, table, r, e, num_rows, num_experts, hidden_split, hidden_row,
    LORA_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of a block of tokens plus the addition of each token's adapter, which is mostly
    zero."""
    slot = tl.load(slots + r, mask=r < num_rows, other=-1)
    entry = table + tl.maximum(slot, 0) * 5
    rank = tl.where(slot >= 0, tl.load(entry + 3).to(tl.int32), 0)
    b = pool + tl.load(entry + 4)
    for first in range(0, tl.max(rank), RANK_BLOCK):
        k = first + tl.arange(0, RANK_BLOCK)
        inside = k[None, :] < rank[:, None]
        at = hidden + r[:, None] * hidden_row + k[None, :]
        h = tl.load(at, mask=inside, other=0.0)
        for split in tl.static_range(1, LORA_SPLITS):
            h += tl.load(at + split * hidden_split, mask=inside, other=0.0)
        weight = tl.load(
            b[:, None, None] + e[None, :, None] * rank[:, None, None] + k[None, None, :],
            mask=inside[:, None, :] & (e < num_experts)[None, :, None], other=0.0,
        )  # fmt: skip
        h = h.to(weight.dtype).to(tl.float32)
        scores += tl.sum(h[:, None, :] * weight.to(tl.float32), axis=2)
    return scores
