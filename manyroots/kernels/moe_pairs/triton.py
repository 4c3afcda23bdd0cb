"""Mixture of experts in three launches (five with adapters), without a word from the host.

Same signatures as `reference.py`. `route` chooses in parallel, and the last program to choose
makes the experts' lists. The two products read each chosen expert's weights once for up to BLOCK_M
of its pairs, and leave the sum over a token's experts to the next kernel: [tokens, top_k, hidden],
transposed, is what `add_rms_norm` takes as partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import (
    as_splits,
    counters,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)
from manyroots.kernels.moe_pairs.adapters import ExpertAdapters
from manyroots.kernels.moe_pairs.routing import Routing

MAX_ROUTED_TOKENS = 128
"""Most tokens whose pairs `route` orders itself; more are sorted by torch."""
SHRINK_K = 256
PAIR_N = 128
"""How much of a pair's inner and outer dimension one program takes at once."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the two products are cut up; found by measurement."""

    up_n: int = 64
    up_k: int = 128
    up_stages: int = 3
    down_n: int = 64
    down_k: int = 128
    down_stages: int = 3
    num_warps: int = 4


@triton.jit
def _choose(
    logits, chosen, weights, ranks, r, num_rows, num_experts, in_split, in_row,
    NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """The likeliest experts of a block of tokens, the first of equals first."""
    e = tl.arange(0, BLOCK_E)
    ok = (r < num_rows)[:, None] & (e < num_experts)[None, :]
    at = logits + r[:, None] * in_row + e[None, :]
    scores = tl.load(at, mask=ok, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        scores += tl.load(at + split * in_split, mask=ok, other=0.0).to(tl.float32)
    scores = tl.where((r < num_rows)[:, None], scores, 0.0)
    probs = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    probs = probs / tl.sum(probs, axis=1)[:, None]
    c = tl.arange(0, BLOCK_C)
    experts = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    best = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    rank = tl.full((BLOCK_R, BLOCK_E), -1, tl.int32)
    for i in range(TOP_K):
        which = tl.argmax(probs, axis=1)
        is_this = c[None, :] == i
        experts = tl.where(is_this, which[:, None], experts)
        best = tl.where(is_this, tl.max(probs, axis=1)[:, None], best)
        is_that = e[None, :] == which[:, None]
        rank = tl.where(is_that, i, rank)
        probs = tl.where(is_that, -1.0, probs)
    if RENORMALISE:
        best = best / tl.sum(best, axis=1)[:, None]
    to = r[:, None] * TOP_K + c[None, :]
    is_pair = (r < num_rows)[:, None] & (c < TOP_K)[None, :]
    tl.store(weights + to, best, mask=is_pair)
    tl.store(chosen + to, experts, mask=is_pair)
    if ORDERS:
        tl.store(ranks + e[None, :] * num_rows + r[:, None], rank, mask=ok)


@triton.jit
def _list(
    ranks, pairs, groups, num_rows, num_experts,
    TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Each expert's pairs into a list of its own, with room for one of every token."""
    e = tl.arange(0, BLOCK_E)
    t = tl.arange(0, BLOCK_T)
    ok = (e < num_experts)[:, None] & (t < num_rows)[None, :]
    at = e[:, None] * num_rows + t[None, :]
    rank = tl.load(ranks + at, mask=ok, other=-1, cache_modifier=".cg")
    mine = (rank >= 0).to(tl.int32)
    place = tl.cumsum(mine, axis=1) - mine
    pair = t[None, :] * TOP_K + rank
    tl.store(pairs + e[:, None] * num_rows + place, pair, mask=ok & (rank >= 0))
    count = tl.sum(mine, axis=1)
    used = (count > 0).to(tl.int32)
    used_before = tl.cumsum(used, axis=0) - used
    to = groups + 3 * tl.where(count > 0, used_before, tl.sum(used) + e - used_before)
    tl.store(to, e, mask=e < num_experts)
    tl.store(to + 1, e * num_rows, mask=e < num_experts)
    tl.store(to + 2, e * num_rows + count, mask=e < num_experts)


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits, chosen, weights, ranks, pairs, groups, counter, num_rows, num_experts, in_split, in_row,
    NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each program chooses for a few tokens; with BLOCK_T, the last one makes the lists."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    _choose(
        logits, chosen, weights, ranks, tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R),
        num_rows, num_experts, in_split, in_row, NUM_SPLITS, TOP_K, RENORMALISE, BLOCK_C, BLOCK_E,
        BLOCK_R, BLOCK_T > 0,
    )  # fmt: skip
    if BLOCK_T:
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(counter, 0)
            _list(ranks, pairs, groups, num_rows, num_experts, TOP_K, BLOCK_E, BLOCK_T)


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """From router logits [tokens, experts] (or partial sums of them)."""
    parts = as_splits(logits)
    num_splits, num_rows, num_experts = parts.shape
    device = logits.device
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    is_small = num_rows <= MAX_ROUTED_TOKENS
    ranks, pairs = torch.empty(
        2, num_experts * num_rows if is_small else 0, dtype=torch.int32, device=device
    )
    groups = torch.empty(num_experts, 3, dtype=torch.int32, device=device)
    block_r, num_warps = (2, 4) if num_rows <= 16 else (8, 8)
    _route[(triton.cdiv(num_rows, block_r),)](
        parts, chosen, weights, ranks, pairs, groups, counters(device), num_rows, num_experts,
        parts.stride(0), parts.stride(1), NUM_SPLITS=num_splits, TOP_K=top_k,
        RENORMALISE=renormalise, BLOCK_C=triton.next_power_of_2(top_k),
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_R=block_r,
        BLOCK_T=max(16, triton.next_power_of_2(num_rows)) if is_small else 0,
        num_warps=num_warps, **launch_options(device),
    )  # fmt: skip
    if is_small:
        return Routing(weights, pairs, groups, chosen)
    return _sorted(chosen, weights, num_experts)


def _sorted(chosen: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Many pairs, in order by torch. Every expert is likely to have some."""
    ordered, pairs = chosen.flatten().sort(stable=True)
    ids = torch.arange(num_experts + 1, dtype=torch.int32, device=chosen.device)
    starts = torch.searchsorted(ordered, ids, out_int32=True)
    groups = torch.stack((ids[:-1], starts[:-1], starts[1:]), dim=1)
    return Routing(weights, pairs.int(), groups, chosen)


@triton.jit
def _add_adapters(
    acc, hidden, pool, table, slots, token, pair, is_pair, expert, n, n_size,
    PART: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """acc [n, pairs] + B[n] h[pair]^T of each pair's own adapter: one product per adapter among
    them, and pairs of one adapter are neighbours."""
    r = tl.arange(0, RANK)
    left = tl.where(is_pair, tl.load(slots + token), -1)
    slot = tl.max(left)
    while slot >= 0:
        entry = table + (slot * NUM_PARTS + PART) * 5
        rank = tl.load(entry + 2).to(tl.int32)
        b = pool + tl.multiple_of(tl.load(entry + 3) + expert * tl.load(entry + 4), 8)
        weight = tl.load(
            b + n[:, None] * rank + r[None, :], mask=(n < n_size)[:, None] & (r < rank)[None, :],
            other=0.0,
        )  # fmt: skip
        mine = (left == slot)[:, None] & (r < rank)[None, :]
        h = tl.load(
            hidden + (pair * NUM_PARTS + PART)[:, None] * RANK + r[None, :], mask=mine, other=0.0
        )
        acc = tl.dot(weight, tl.trans(h.to(weight.dtype)), acc, input_precision="ieee")
        left = tl.where(left == slot, -1, left)
        slot = tl.max(left)
    return acc


@triton.jit
def _shrink(
    x, hidden, pool, table, scalings, slots, pairs, groups, k_size, top_k,
    BY_PAIR: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """scaling * x A^T of an expert's pairs, each with its own adapter's A for that expert."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    part = tl.program_id(0)
    expert = tl.load(groups + 3 * tl.program_id(1)).to(tl.int64)
    begin = tl.load(groups + 3 * tl.program_id(1) + 1)
    end = tl.load(groups + 3 * tl.program_id(1) + 2)
    k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, RANK)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        row = pair if BY_PAIR else pair // top_k
        left = tl.where(m < end, tl.load(slots + pair // top_k), -1)
        slot = tl.max(left)
        while slot >= 0:
            entry = table + (slot * NUM_PARTS + part) * 5
            rank = tl.load(entry + 2).to(tl.int32)
            a = pool + tl.multiple_of(tl.load(entry) + expert * tl.load(entry + 1), 8)
            mine = (left == slot)[:, None]
            acc = tl.zeros((BLOCK_M, RANK), tl.float32)
            for at in range(0, k_size, BLOCK_K):
                xs = tl.load(x + row[:, None] * k_size + at + k[None, :], mask=mine, other=0.0)
                weight = tl.load(
                    a + r[:, None] * k_size + at + k[None, :], mask=(r < rank)[:, None], other=0.0
                )
                acc = tl.dot(xs, tl.trans(weight), acc, input_precision="ieee")
            acc *= tl.load(scalings + slot * NUM_PARTS + part)
            to = hidden + (pair * NUM_PARTS + part)[:, None] * RANK + r[None, :]
            tl.store(to, acc, mask=mine & (r < rank)[None, :])
            left = tl.where(left == slot, -1, left)
            slot = tl.max(left)


@triton.jit
def _shrink_pair(
    x, hidden, pool, table, scalings, slots, chosen, work, num_pairs, k_size, top_k,
    BY_PAIR: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One part of one pair: few pairs share an expert and an adapter, so each reads its own A."""
    pair = (work // NUM_PARTS).to(tl.int64)
    part = work % NUM_PARTS
    if pair < num_pairs:
        slot = tl.load(slots + pair // top_k)
        if slot >= 0:
            entry = table + (slot * NUM_PARTS + part) * 5
            expert = tl.load(chosen + pair).to(tl.int64)
            rank = tl.load(entry + 2).to(tl.int32)
            a = pool + tl.multiple_of(tl.load(entry) + expert * tl.load(entry + 1), 8)
            r = tl.arange(0, RANK)
            k = tl.arange(0, BLOCK_K)
            row = pair if BY_PAIR else pair // top_k
            acc = tl.zeros((RANK, BLOCK_K), tl.float32)
            for at in range(0, k_size, BLOCK_K):
                weight = tl.load(
                    a + r[:, None] * k_size + at + k[None, :], mask=(r < rank)[:, None], other=0.0
                )
                xs = tl.load(x + row * k_size + at + k).to(tl.float32)
                acc += weight.to(tl.float32) * xs[None, :]
            shrunk = tl.sum(acc, axis=1) * tl.load(scalings + slot * NUM_PARTS + part)
            tl.store(hidden + (pair * NUM_PARTS + part) * RANK + r, shrunk)


@triton.jit
def _expand_pair(
    hidden, pool, table, slots, chosen, pair, top_k, n, n_size,
    PART: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """B[n] h of one pair, [n]; zeros for a token of the base model."""
    slot = tl.load(slots + pair // top_k)
    entry = table + (tl.maximum(slot, 0) * NUM_PARTS + PART) * 5
    rank = tl.where(slot >= 0, tl.load(entry + 2).to(tl.int32), 0)
    expert = tl.load(chosen + pair).to(tl.int64)
    b = pool + tl.multiple_of(tl.load(entry + 3) + expert * tl.load(entry + 4), 8)
    r = tl.arange(0, RANK)
    weight = tl.load(
        b + n[:, None] * rank + r[None, :], mask=(n < n_size)[:, None] & (r < rank)[None, :],
        other=0.0,
    )  # fmt: skip
    h = tl.load(hidden + (pair * NUM_PARTS + PART) * RANK + r, mask=r < rank, other=0.0)
    h = h.to(weight.dtype).to(tl.float32)
    return tl.sum(weight.to(tl.float32) * h[None, :], axis=1)


@triton.jit
def _act_pairs(
    both, out, hidden, pool, table, slots, chosen, n_size, top_k,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of each pair, with what its adapter adds to the two."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = both + pair * 2 * n_size + n
    gate = tl.load(at, mask=n < n_size, other=0.0).to(tl.float32)
    up = tl.load(at + n_size, mask=n < n_size, other=0.0).to(tl.float32)
    gate += _expand_pair(
        hidden, pool, table, slots, chosen, pair, top_k, n, n_size, 0, 2, RANK, BLOCK_N
    )
    up += _expand_pair(
        hidden, pool, table, slots, chosen, pair, top_k, n, n_size, 1, 2, RANK, BLOCK_N
    )
    tl.store(out + pair * n_size + n, gate * tl.sigmoid(gate) * up, mask=n < n_size)


@triton.jit
def _expand_pairs(
    out, weights, hidden, pool, table, slots, chosen, n_size, top_k,
    RANK: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add to each pair's weighted output what its adapter adds, weighted too."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    if tl.load(slots + pair // top_k) >= 0:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        delta = _expand_pair(
            hidden, pool, table, slots, chosen, pair, top_k, n, n_size, 0, 1, RANK, BLOCK_N
        )
        at = out + pair * n_size + n
        value = tl.load(at, mask=n < n_size, other=0.0) + delta * tl.load(weights + pair)
        tl.store(at, value, mask=n < n_size)


@triton.jit
def _up(
    x, gate_up, pairs, groups, out, hidden, pool, table, scalings, slots, chosen, num_pairs,
    n_size, k_size, top_k,
    RANK: tl.constexpr, SHRINK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of an expert's pairs, each at its own pair's place. With SHRINK_K, gates and
    ups as they are, and further programs that shrink: `_act_pairs` follows."""
    let_next_begin(DEPENDENT)
    if SHRINK_K:
        tiles = tl.cdiv(n_size, BLOCK_N)
        if tl.program_id(0) >= tiles:
            wait_for_inputs(DEPENDENT)
            work = (tl.program_id(0) - tiles) * tl.num_programs(1) + tl.program_id(1)
            _shrink_pair(
                x, hidden, pool, table, scalings, slots, chosen, work, num_pairs, k_size, top_k,
                False, 2, RANK, SHRINK_K,
            )  # fmt: skip
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wait_for_inputs(DEPENDENT)
    expert = tl.load(groups + 3 * tl.program_id(1)).to(tl.int64)
    begin = tl.load(groups + 3 * tl.program_id(1) + 1)
    end = tl.load(groups + 3 * tl.program_id(1) + 2)
    w_at = (
        gate_up + (expert * 2 * n_size + tl.minimum(n, n_size - 1))[:, None] * k_size + k[None, :]
    )
    up_at = w_at + n_size.to(tl.int64) * k_size
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        x_at = x + (pair // top_k)[:, None] * k_size + k[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            gates = tl.load(w_at + at, eviction_policy="evict_first")
            ups = tl.load(up_at + at, eviction_policy="evict_first")
            xs = tl.trans(tl.load(x_at + at, mask=(m < end)[:, None], other=0.0))
            gate = tl.dot(gates, xs, gate, input_precision="ieee")
            up = tl.dot(ups, xs, up, input_precision="ieee")
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        if SHRINK_K:
            to = out + pair[:, None] * 2 * n_size + n[None, :]
            tl.store(to, tl.trans(gate), mask=ok)
            tl.store(to + n_size, tl.trans(up), mask=ok)
        elif RANK:
            gate = _add_adapters(
                gate, hidden, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                0, 2, RANK,
            )  # fmt: skip
            up = _add_adapters(
                up, hidden, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                1, 2, RANK,
            )  # fmt: skip
        if not SHRINK_K:
            value = tl.trans(gate * tl.sigmoid(gate) * up)
            tl.store(out + pair[:, None] * n_size + n[None, :], value, mask=ok)


@triton.jit
def _down(
    inner, down, pairs, groups, weights, out, hidden, pool, table, scalings, slots, chosen,
    num_pairs, n_size, k_size, top_k,
    RANK: tl.constexpr, SHRINK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(inner) of an expert's pairs, each at its own pair's place. With SHRINK_K, there
    are further programs that shrink: `_expand_pairs` follows."""
    let_next_begin(DEPENDENT)
    if SHRINK_K:
        tiles = tl.cdiv(n_size, BLOCK_N)
        if tl.program_id(0) >= tiles:
            wait_for_inputs(DEPENDENT)
            work = (tl.program_id(0) - tiles) * tl.num_programs(1) + tl.program_id(1)
            _shrink_pair(
                inner, hidden, pool, table, scalings, slots, chosen, work, num_pairs, k_size,
                top_k, True, 1, RANK, SHRINK_K,
            )  # fmt: skip
            return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    wait_for_inputs(DEPENDENT)
    expert = tl.load(groups + 3 * tl.program_id(1)).to(tl.int64)
    begin = tl.load(groups + 3 * tl.program_id(1) + 1)
    end = tl.load(groups + 3 * tl.program_id(1) + 2)
    w_at = down + (expert * n_size + tl.minimum(n, n_size - 1))[:, None] * k_size + k[None, :]
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        h_at = inner + pair[:, None] * k_size + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            weight = tl.load(w_at + at, eviction_policy="evict_first")
            hs = tl.trans(tl.load(h_at + at, mask=(m < end)[:, None], other=0.0))
            acc = tl.dot(weight, hs, acc, input_precision="ieee")
        if RANK and not SHRINK_K:
            acc = _add_adapters(
                acc, hidden, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                0, 1, RANK,
            )  # fmt: skip
        value = tl.trans(acc) * tl.load(weights + pair)[:, None]
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        tl.store(out + pair[:, None] * n_size + n[None, :], value, mask=ok)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters | None = None,
    *,
    tiling: ExpertTiling | None = None,
) -> Tensor:
    """Each pair's weighted output, float32 [tokens, top_k, hidden].

    gate_up is [experts, 2 n, hidden] (gates first), down is [experts, hidden, n].
    """
    tiling = tiling or ExpertTiling()
    num_tokens, top_k = routing.weights.shape
    num_experts, hidden_size, n_size = down.shape
    num_pairs = num_tokens * top_k
    options = launch_options(x.device)
    groups = _most_used(routing, num_experts)
    block_m = 16 if num_pairs <= 8 * num_experts else 64
    gates = _Adapted.of(adapters, routing, x, groups, tiling.up_k, of_gate_up=True)
    inner = torch.empty(num_pairs, n_size, dtype=x.dtype, device=x.device)
    both = inner
    if gates.shrink_k:
        both = torch.empty(num_pairs, 2 * n_size, dtype=torch.float32, device=x.device)
    _up[(triton.cdiv(n_size, tiling.up_n) + gates.num_columns, groups)](
        x, gate_up, routing.pairs, routing.groups, both, *gates.tensors, num_pairs, n_size,
        hidden_size, top_k,
        RANK=gates.rank, SHRINK_K=gates.shrink_k, BLOCK_M=block_m, BLOCK_N=tiling.up_n,
        BLOCK_K=tiling.up_k, num_stages=tiling.up_stages, num_warps=tiling.num_warps, **options,
    )  # fmt: skip
    if gates.shrink_k:
        _act_pairs[(triton.cdiv(n_size, PAIR_N), num_pairs)](
            both, inner, *gates.expand_tensors, n_size, top_k, RANK=gates.rank, BLOCK_N=PAIR_N,
            **options,
        )  # fmt: skip
    downs = _Adapted.of(adapters, routing, inner, groups, tiling.down_k, of_gate_up=False)
    out = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden_size, tiling.down_n) + downs.num_columns, groups)](
        inner, down, routing.pairs, routing.groups, routing.weights, out, *downs.tensors,
        num_pairs, hidden_size, n_size, top_k,
        RANK=downs.rank, SHRINK_K=downs.shrink_k, BLOCK_M=block_m, BLOCK_N=tiling.down_n,
        BLOCK_K=tiling.down_k, num_stages=tiling.down_stages, num_warps=tiling.num_warps,
        **options,
    )  # fmt: skip
    if downs.shrink_k:
        _expand_pairs[(triton.cdiv(hidden_size, PAIR_N), num_pairs)](
            out, routing.weights, *downs.expand_tensors, hidden_size, top_k, RANK=downs.rank,
            BLOCK_N=PAIR_N, **options,
        )  # fmt: skip
    return out.view(num_tokens, top_k, hidden_size)


def _most_used(routing: Routing, num_experts: int) -> int:
    """How many experts can have pairs; they come first."""
    num_tokens, top_k = routing.weights.shape
    return min(num_experts, num_tokens * top_k) if num_tokens <= MAX_ROUTED_TOKENS else num_experts


@dataclass(frozen=True, slots=True)
class _Adapted:
    """How the adapters of one product are computed.

    A decode step has few pairs for each expert and adapter: every pair by itself, shrunk beside the
    product and expanded by a kernel of its own. In a prefill tiles of pairs are shrunk before the
    product, which expands them.
    """

    tensors: tuple[Tensor, ...]
    """hidden, pool, table, scalings, slots, the pairs' experts."""
    rank: int
    """How many columns of `hidden` each part has; 0 without adapters."""
    shrink_k: int
    """With every pair by itself: how much of its inner dimension is read at once; else 0."""
    num_columns: int
    """Further programs for each group of pairs, which shrink."""

    @property
    def expand_tensors(self) -> tuple[Tensor, ...]:
        hidden, pool, table, _, slots, chosen = self.tensors
        return hidden, pool, table, slots, chosen

    @classmethod
    def of(
        cls,
        adapters: ExpertAdapters | None,
        routing: Routing,
        x: Tensor,
        groups: int,
        block_k: int,
        *,
        of_gate_up: bool,
    ) -> _Adapted:
        """x is of tokens before gate and up, and of pairs before down."""
        if adapters is None:
            return cls((x,) * 6, 0, 0, 0)
        site = adapters.gate_up if of_gate_up else adapters.down
        num_tokens, top_k = routing.weights.shape
        k_size = x.shape[1]
        rank = max(16, triton.next_power_of_2(site.max_rank))
        shape = (num_tokens * top_k, site.num_parts * rank)
        hidden = torch.empty(shape, dtype=torch.float32, device=x.device)
        tensors = (hidden, site.pool, site.table, site.scalings, adapters.slots, routing.experts)
        if num_tokens <= MAX_ROUTED_TOKENS:
            columns = triton.cdiv(num_tokens * top_k * site.num_parts, groups)
            return cls(tensors, rank, min(SHRINK_K, k_size & -k_size), columns)
        _shrink[(site.num_parts, groups)](
            x, hidden, site.pool, site.table, site.scalings, adapters.slots, routing.pairs,
            routing.groups, k_size, top_k,
            BY_PAIR=not of_gate_up, NUM_PARTS=site.num_parts, RANK=rank, BLOCK_M=16,
            BLOCK_K=block_k, num_warps=4, num_stages=4, **launch_options(x.device),
        )  # fmt: skip
        return cls(tensors, rank, 0, 0)
