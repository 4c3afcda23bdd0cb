"""Adapters of experts in Triton, for few tokens: what they add to the tiles of `both_products`.

A decode has about one pair per adapter and expert, so it is computed pair by pair; pairs that share
a matrix find it in the cache. Adapters cost no launch, only their bytes:

    shrink_tile    h = A x of each pair, as further tiles before the first product's
    activated_pair activation(gate + B h, up + B h) of a pair in a tile of the first product, and
                   that tile's part of h = A of it
    down_of_pair   W x + B h of a pair in a tile of the second product

Nothing is gathered or copied. Pairs of many tokens share matrices: see `triton_tile_adapters.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.activation.triton_kinds import activated
from manyroots.kernels.fused_moe.adapters import PART_WIDTH
from manyroots.kernels.launch import wait_for_inputs

SHRINK_N = tl.constexpr(64)
"""Rows of A that one program takes, of one pair or several."""
SHRINK_M = tl.constexpr(16)
"""At least the number of tokens of those pairs: a pair has 8 rows or more."""
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
def shrink_tile(
    x, shrunk, slots, experts, pool, table, scalings, tile, num_pairs, top_k, k_size, max_rank,
    NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, IS_SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """scaling * A x for SHRINK_N of all pairs' ranks, `max_rank` for each part of each pair.
    IS_SHARED: of the block that every token goes through, whose pairs are the tokens.

    One matrix instruction covers rows of several tokens; each row keeps the result of its own
    token.
    """
    width = NUM_PARTS * max_rank
    v = tile * SHRINK_N + tl.arange(0, SHRINK_N)
    pair = tl.minimum(v // width, num_pairs - 1)
    n = v % width
    token = pair // top_k
    slot = tl.load(slots + token)
    part = n // max_rank
    a, step, rank = _first_half(table, slot, part, k_size, NUM_PARTS, IS_SHARED)
    exists = (n % max_rank < rank) & (v < num_pairs * width)
    if tl.max(exists.to(tl.int32)) > 0:
        wait_for_inputs(DEPENDENT)
        offset = a + (n % max_rank).to(tl.int64) * k_size
        if not IS_SHARED:
            offset += tl.load(experts + pair) * step
        k = tl.arange(0, BLOCK_K)
        a_at = (pool + tl.multiple_of(offset, 8))[:, None] + k[None, :]
        first = tl.min(token)
        m = tl.arange(0, SHRINK_M)
        is_token = (first + m <= tl.max(token))[:, None]
        x_at = x + (first + m)[:, None].to(tl.int64) * k_size + k[None, :]
        acc = tl.zeros((SHRINK_N, SHRINK_M), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            if EVEN_K:
                weight = tl.load(a_at + at, mask=exists[:, None], other=0.0)
                xs = tl.load(x_at + at, mask=is_token, other=0.0)
            else:
                inside = (at + k < k_size)[None, :]
                weight = tl.load(a_at + at, mask=exists[:, None] & inside, other=0.0)
                xs = tl.load(x_at + at, mask=is_token & inside, other=0.0)
            acc = tl.dot(weight, tl.trans(xs), acc, input_precision="ieee")
        own = m[None, :] == (token - first)[:, None]
        value = tl.sum(tl.where(own, acc, 0.0), axis=1)
        value *= tl.load(scalings + tl.maximum(slot, 0) * NUM_PARTS + part)
        tl.store(shrunk + pair.to(tl.int64) * width + n, value, mask=exists)


@triton.jit
def _ranks_of(b, rank, first, n, is_n):
    """B[n] of the ranks from `first` on: [n, RANK_BLOCK]."""
    r = first + tl.arange(0, RANK_BLOCK)
    ok = is_n[:, None] & (r < rank)[None, :]
    return tl.load(b + n[:, None] * rank + r[None, :], mask=ok, other=0.0)


@triton.jit
def _expand(acc, first_ranks, b, rank, h, n, is_n):
    """acc + B[n] h for one pair; `first_ranks` are the already loaded `_ranks_of` 0."""
    weight = first_ranks
    for first in range(0, rank, RANK_BLOCK):
        if first > 0:
            weight = _ranks_of(b, rank, first, n, is_n)
        r = first + tl.arange(0, RANK_BLOCK)
        hs = tl.load(h + r, mask=r < rank, other=0.0, cache_modifier=".cg")
        acc += tl.sum(weight.to(tl.float32) * hs[None, :], axis=1)
    return acc


@triton.jit
def _columns_of(a, rank, first, n, is_n, n_size):
    """A[:, n] of the ranks from `first` on: [RANK_BLOCK, n]."""
    r = first + tl.arange(0, RANK_BLOCK)
    ok = (r < rank)[:, None] & is_n[None, :]
    return tl.load(a + r[:, None] * n_size + n[None, :], mask=ok, other=0.0)


@triton.jit
def _column(tile, i, BLOCK_M: tl.constexpr):
    """Column i of a tile with BLOCK_M."""
    is_it = (tl.arange(0, BLOCK_M) == i)[None, :]
    return tl.sum(tl.where(is_it, tile, 0.0), axis=1)


@triton.jit
def activated_pair(
    gates, ups, i, pair, expert, n, n_size, inner, shrunk, down_shrunk, slots, pool, up_table,
    table, scalings, top_k, up_max_rank, max_rank, KIND: tl.constexpr, BLOCK_M: tl.constexpr,
    IS_SHARED: tl.constexpr,
):  # fmt: skip
    """Complete and store the activations at `n` of one pair, column i of a tile's gates and ups,
    and their part of the pair's shrink."""
    is_n = n < n_size
    slot = tl.load(slots + pair // top_k).to(tl.int64)
    gate_b, gate_step, gate_rank = _second_half(up_table, slot, 0, 2, IS_SHARED)
    up_b, up_step, up_rank = _second_half(up_table, slot, 1, 2, IS_SHARED)
    a, a_step, rank = _first_half(table, slot, 0, n_size, 1, IS_SHARED)
    gate_b = pool + tl.multiple_of(gate_b + expert * gate_step, 8)
    up_b = pool + tl.multiple_of(up_b + expert * up_step, 8)
    a = pool + tl.multiple_of(a + expert * a_step, 8)
    first_gates = _ranks_of(gate_b, gate_rank, 0, n, is_n)
    first_ups = _ranks_of(up_b, up_rank, 0, n, is_n)
    downs = _columns_of(a, rank, 0, n, is_n, n_size)
    h = shrunk + pair * 2 * up_max_rank
    gate = _expand(_column(gates, i, BLOCK_M), first_gates, gate_b, gate_rank, h, n, is_n)
    up = _expand(_column(ups, i, BLOCK_M), first_ups, up_b, up_rank, h + up_max_rank, n, is_n)
    value = activated(gate, up, KIND).to(inner.dtype.element_ty)
    tl.store(inner + pair * n_size + n, value, mask=is_n)
    scale = tl.load(scalings + tl.maximum(slot, 0))
    for first in range(0, rank, RANK_BLOCK):
        if first > 0:
            downs = _columns_of(a, rank, first, n, is_n, n_size)
        total = tl.sum(downs.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
        r = first + tl.arange(0, RANK_BLOCK)
        tl.store(down_shrunk + pair * max_rank + r, total * scale, mask=r < rank)


@triton.jit
def down_of_pair(
    tile, i, pair, expert, n, n_size, shrunk, split, slots, pool, table, top_k, max_rank,
    NUM_SPLITS: tl.constexpr, SPLITS_POW: tl.constexpr, BLOCK_M: tl.constexpr,
    IS_SHARED: tl.constexpr,
):  # fmt: skip
    """Column i of a tile of the second product plus B h of that pair, at `n`. `shrunk` has partial
    sums of h, `split` apart."""
    is_n = n < n_size
    slot = tl.load(slots + pair // top_k).to(tl.int64)
    b, step, rank = _second_half(table, slot, 0, 1, IS_SHARED)
    b = pool + tl.multiple_of(b + expert * step, 8)
    acc = _column(tile, i, BLOCK_M)
    s = tl.arange(0, SPLITS_POW)
    for first in range(0, rank, RANK_BLOCK):
        r = first + tl.arange(0, RANK_BLOCK)
        ok = (s < NUM_SPLITS)[:, None] & (r < rank)[None, :]
        at = shrunk + s[:, None].to(tl.int64) * split + pair * max_rank + r[None, :]
        h = tl.sum(tl.load(at, mask=ok, other=0.0, cache_modifier=".cg"), axis=0)
        weight = _ranks_of(b, rank, first, n, is_n)
        acc += tl.sum(weight.to(tl.float32) * h[None, :], axis=1)
    return acc


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
