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
    if ORDERS:
        tl.store(ranks + e[None, :] * num_rows + r[:, None], rank, mask=ok)
    else:
        tl.store(chosen + to, experts, mask=is_pair)


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
    return Routing(weights, pairs, groups) if is_small else _sorted(chosen, weights, num_experts)


def _sorted(chosen: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Many pairs, in order by torch. Every expert is likely to have some."""
    ordered, pairs = chosen.flatten().sort(stable=True)
    ids = torch.arange(num_experts + 1, dtype=torch.int32, device=chosen.device)
    starts = torch.searchsorted(ordered, ids, out_int32=True)
    groups = torch.stack((ids[:-1], starts[:-1], starts[1:]), dim=1)
    return Routing(weights, pairs.int(), groups)


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
def _up(
    x, gate_up, pairs, groups, out, hidden, pool, table, slots, n_size, k_size, top_k,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of an expert's pairs, each at its own pair's place."""
    let_next_begin(DEPENDENT)
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
        if RANK:
            gate = _add_adapters(
                gate, hidden, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                0, 2, RANK,
            )  # fmt: skip
            up = _add_adapters(
                up, hidden, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                1, 2, RANK,
            )  # fmt: skip
        value = tl.trans(gate * tl.sigmoid(gate) * up)
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        tl.store(out + pair[:, None] * n_size + n[None, :], value, mask=ok)


@triton.jit
def _down(
    inner, down, pairs, groups, weights, out, hidden, pool, table, slots, n_size, k_size, top_k,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(inner) of an expert's pairs, each at its own pair's place."""
    let_next_begin(DEPENDENT)
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
        if RANK:
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
    lora, rank = _shrunk(x, routing, adapters, groups, tiling.up_k, of_gate_up=True)
    inner = torch.empty(num_pairs, n_size, dtype=x.dtype, device=x.device)
    _up[(triton.cdiv(n_size, tiling.up_n), groups)](
        x, gate_up, routing.pairs, routing.groups, inner, *lora, n_size, hidden_size, top_k,
        RANK=rank, BLOCK_M=block_m, BLOCK_N=tiling.up_n, BLOCK_K=tiling.up_k,
        num_stages=tiling.up_stages, num_warps=tiling.num_warps, **options,
    )  # fmt: skip
    lora, rank = _shrunk(inner, routing, adapters, groups, tiling.down_k, of_gate_up=False)
    out = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden_size, tiling.down_n), groups)](
        inner, down, routing.pairs, routing.groups, routing.weights, out, *lora, hidden_size,
        n_size, top_k,
        RANK=rank, BLOCK_M=block_m, BLOCK_N=tiling.down_n, BLOCK_K=tiling.down_k,
        num_stages=tiling.down_stages, num_warps=tiling.num_warps, **options,
    )  # fmt: skip
    return out.view(num_tokens, top_k, hidden_size)


def _most_used(routing: Routing, num_experts: int) -> int:
    """How many experts can have pairs; they come first."""
    num_tokens, top_k = routing.weights.shape
    return min(num_experts, num_tokens * top_k) if num_tokens <= MAX_ROUTED_TOKENS else num_experts


def _shrunk(
    x: Tensor,
    routing: Routing,
    adapters: ExpertAdapters | None,
    groups: int,
    block_k: int,
    *,
    of_gate_up: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], int]:
    """What adapters shrink x to (of tokens before gate and up, of pairs before down), with what is
    needed to expand it; and how many columns each part has, 0 without adapters."""
    if adapters is None:
        return (x, x, x, x), 0
    site = adapters.gate_up if of_gate_up else adapters.down
    num_tokens, top_k = routing.weights.shape
    rank = max(16, triton.next_power_of_2(site.max_rank))
    shape = (num_tokens * top_k, site.num_parts * rank)
    hidden = torch.empty(shape, dtype=torch.float32, device=x.device)
    _shrink[(site.num_parts, groups)](
        x, hidden, site.pool, site.table, site.scalings, adapters.slots, routing.pairs,
        routing.groups, x.shape[1], top_k,
        BY_PAIR=not of_gate_up, NUM_PARTS=site.num_parts, RANK=rank, BLOCK_M=16, BLOCK_K=block_k,
        num_warps=4, num_stages=4, **launch_options(x.device),
    )  # fmt: skip
    return (hidden, site.pool, site.table, adapters.slots), rank
