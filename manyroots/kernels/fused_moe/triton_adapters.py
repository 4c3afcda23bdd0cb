"""Adapters of experts in Triton, for few tokens: their part of the two products, and the step
between.

A decode has about one pair per adapter and expert, so it is computed pair by pair; pairs that share
a matrix find it in the cache. Adapters cost one more launch, and their bytes:

    _up        gate, up = W x of each pair; and as further tiles h = A x of each pair
    activate   activation(gate + B h, up + B h), and h = A of that
    _down      weight * W x of each pair; and as further tiles the sum of weight * B h of each token

`shrink_tile` and `expand_tile` are the additional tiles; the products themselves are in
`triton.py`. Nothing is gathered or copied. Pairs of many tokens share matrices: see
`triton_tile_adapters.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from manyroots.kernels.activation.triton_kinds import activated
from manyroots.kernels.fused_moe.adapters import PART_WIDTH
from manyroots.kernels.launch import let_next_begin, wait_for_inputs

SHRINK_N = tl.constexpr(64)
"""Rows of A that one program takes, of one pair or several."""
SHRINK_M = tl.constexpr(16)
"""At least the number of tokens of those pairs: a pair has 8 rows or more."""
EXPAND_N = tl.constexpr(128)
"""Columns of a token's output that one program takes."""
RANK_BLOCK = tl.constexpr(16)
"""Ranks that are multiplied at once."""
_PART_WIDTH = tl.constexpr(PART_WIDTH)


@triton.jit
def shrink_tile(
    x, shrunk, slots, experts, pool, table, scalings, tile, num_pairs, top_k, k_size, max_rank,
    NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """scaling * A x for SHRINK_N of all pairs' ranks, `max_rank` for each part of each pair.

    One matrix instruction covers rows of several tokens; each row keeps the result of its own
    token.
    """
    width = NUM_PARTS * max_rank
    v = tile * SHRINK_N + tl.arange(0, SHRINK_N)
    pair = tl.minimum(v // width, num_pairs - 1)
    n = v % width
    token = pair // top_k
    slot = tl.load(slots + token)
    part = tl.maximum(slot, 0) * NUM_PARTS + n // max_rank
    entry = table + part * _PART_WIDTH
    a, step = tl.load(entry), tl.load(entry + 1)
    exists = (slot >= 0) & (n % max_rank < tl.load(entry + 2)) & (v < num_pairs * width)
    if tl.max(exists.to(tl.int32)) > 0:
        wait_for_inputs(DEPENDENT)
        let_next_begin(DEPENDENT)
        expert = tl.load(experts + pair)
        offset = a + expert * step + (n % max_rank).to(tl.int64) * k_size
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
        value = tl.sum(tl.where(own, acc, 0.0), axis=1) * tl.load(scalings + part)
        tl.store(shrunk + pair.to(tl.int64) * width + n, value, mask=exists)


@triton.jit
def _second_half(table, slot, part: tl.constexpr, NUM_PARTS: tl.constexpr):
    """A slot's part: its rank (0 without an adapter), its B and the distance to the next
    expert's."""
    entry = table + (tl.maximum(slot, 0) * NUM_PARTS + part) * _PART_WIDTH
    rank = tl.where(slot >= 0, tl.load(entry + 2).to(tl.int32), 0)
    return tl.multiple_of(rank, 8), tl.load(entry + 3), tl.load(entry + 4)


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
        hs = tl.load(h + r, mask=r < rank, other=0.0)
        acc += tl.sum(weight.to(tl.float32) * hs[None, :], axis=1)
    return acc


@triton.jit
def _columns_of(a, rank, first, n, is_n, n_size):
    """A[:, n] of the ranks from `first` on: [RANK_BLOCK, n]."""
    r = first + tl.arange(0, RANK_BLOCK)
    ok = (r < rank)[:, None] & is_n[None, :]
    return tl.load(a + r[:, None] * n_size + n[None, :], mask=ok, other=0.0)


@triton.jit(do_not_specialize=["num_pairs"])
def activate(
    gate_up, up_shrunk, inner, shrunk, slots, experts, pool, up_table, table, scalings, num_pairs,
    top_k, n_size, up_max_rank, max_rank,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a pair's activations from its two products, and their shrink by its adapter.

    Each program takes BLOCK_N of a pair's columns and writes a partial sum. It may read the routing
    at once: with adapters, `_up` waits for the routing before it lets this kernel start.
    """
    let_next_begin(DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < n_size
    slot = tl.load(slots + pair // top_k).to(tl.int64)
    gate_rank, gate_b, gate_step = _second_half(up_table, slot, 0, 2)
    up_rank, up_b, up_step = _second_half(up_table, slot, 1, 2)
    entry = table + tl.maximum(slot, 0) * _PART_WIDTH
    a, a_step = tl.load(entry), tl.load(entry + 1)
    rank = tl.where(slot >= 0, tl.load(entry + 2).to(tl.int32), 0)
    scale = tl.load(scalings + tl.maximum(slot, 0))
    expert = tl.load(experts + pair, cache_modifier=".cg")
    gate_b = pool + tl.multiple_of(gate_b + expert * gate_step, 8)
    up_b = pool + tl.multiple_of(up_b + expert * up_step, 8)
    a = pool + tl.multiple_of(a + expert * a_step, 8)
    gates = _ranks_of(gate_b, gate_rank, 0, n, is_n)
    ups = _ranks_of(up_b, up_rank, 0, n, is_n)
    downs = _columns_of(a, rank, 0, n, is_n, n_size)
    wait_for_inputs(DEPENDENT)
    at = gate_up + pair * 2 * n_size + n
    gate = tl.load(at, mask=is_n, other=0.0)
    up = tl.load(at + n_size, mask=is_n, other=0.0)
    h = up_shrunk + pair * 2 * up_max_rank
    gate = _expand(gate, gates, gate_b, gate_rank, h, n, is_n)
    up = _expand(up, ups, up_b, up_rank, h + up_max_rank, n, is_n)
    value = activated(gate, up, KIND).to(inner.dtype.element_ty)
    tl.store(inner + pair * n_size + n, value, mask=is_n)
    to = shrunk + (tl.program_id(1).to(tl.int64) * num_pairs + pair) * max_rank
    for first in range(0, rank, RANK_BLOCK):
        if first > 0:
            downs = _columns_of(a, rank, first, n, is_n, n_size)
        total = tl.sum(downs.to(tl.float32) * value.to(tl.float32)[None, :], axis=1)
        r = first + tl.arange(0, RANK_BLOCK)
        tl.store(to + r, total * scale, mask=r < rank)


@triton.jit
def expand_tile(
    out, shrunk, weights, experts, slots, pool, table, tile, num_tokens, n_size, max_rank,
    TOP_K: tl.constexpr, BLOCK_P: tl.constexpr, NUM_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The sum of weight * B h of EXPAND_N columns of a token's pairs, stored after the pairs'
    outputs."""
    tiles = tl.cdiv(n_size, EXPAND_N)
    token = (tile // tiles).to(tl.int64)
    n = tile % tiles * EXPAND_N + tl.arange(0, EXPAND_N)
    if token < num_tokens:
        rank, b, step = _second_half(table, tl.load(slots + token).to(tl.int64), 0, 1)
        p = tl.arange(0, BLOCK_P)
        pair = token * TOP_K + p
        acc = tl.zeros((EXPAND_N,), tl.float32)
        wait_for_inputs(DEPENDENT)
        expert = tl.load(experts + pair, mask=p < TOP_K, other=0)
        weight = tl.load(weights + pair, mask=p < TOP_K, other=0.0)
        start = tl.multiple_of(b + expert * step, 8)
        for first in range(0, rank, RANK_BLOCK):
            r = first + tl.arange(0, RANK_BLOCK)
            ok = (p < TOP_K)[:, None] & (r < rank)[None, :]
            inside = ok[:, None, :] & (n < n_size)[None, :, None]
            at = start[:, None, None] + (n * rank)[None, :, None] + r[None, None, :]
            second = tl.load(pool + at, mask=inside, other=0.0).to(tl.float32)
            h_at = shrunk + pair[:, None] * max_rank + r[None, :]
            h = tl.load(h_at, mask=ok, other=0.0)
            for split in tl.static_range(1, NUM_SPLITS):
                h += tl.load(
                    h_at + split * num_tokens.to(tl.int64) * TOP_K * max_rank, mask=ok, other=0.0
                )
            h *= weight[:, None]
            acc += tl.sum(tl.sum(second * h[:, None, :], axis=2), axis=0)
        tl.store(out + (token * (TOP_K + 1) + TOP_K) * n_size + n, acc, mask=n < n_size)


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
