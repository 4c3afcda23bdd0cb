"""Mixture of experts in three launches, without a word from the host.

Same signatures as `reference.py`. `route` is one program for a decode step's few tokens. The two
products read each chosen expert's weights once for up to BLOCK_M of its pairs, and leave the sum
over a token's experts to the next kernel: [tokens, top_k, hidden], transposed, is what
`add_rms_norm` takes as partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import as_splits, launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.moe.routing import Routing

MAX_ROUTED_PAIRS = 1024
"""Most pairs that `route` orders within one program; more are sorted by torch."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the two products are cut up; found by measurement."""

    up_n: int = 64
    up_k: int = 128
    up_stages: int = 4
    down_n: int = 128
    down_k: int = 128
    down_stages: int = 3
    num_warps: int = 4


@triton.jit(do_not_specialize=["num_rows"])
def _top_k(
    logits, chosen, weights, num_rows, num_experts, in_split, in_row,
    NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The likeliest experts of a block of tokens, the first of equals first."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.arange(0, BLOCK_E)
    ok = (r < num_rows)[:, None] & (e < num_experts)[None, :]
    at = logits + r[:, None] * in_row + e[None, :]
    scores = tl.load(at, mask=ok, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        scores += tl.load(at + split * in_split, mask=ok, other=0.0).to(tl.float32)
    scores = tl.where((r < num_rows)[:, None], scores, 0.0)
    probs = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    probs = probs / tl.sum(probs, axis=1)[:, None]
    total = tl.zeros((BLOCK_R,), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(probs, axis=1)
        which = tl.min(tl.where(probs == best[:, None], e[None, :], BLOCK_E), axis=1)
        which = tl.minimum(which, num_experts - 1)
        tl.store(chosen + r * TOP_K + i, which, mask=r < num_rows)
        tl.store(weights + r * TOP_K + i, best, mask=r < num_rows)
        total += best
        probs = tl.where(e[None, :] == which[:, None], -1.0, probs)
    if RENORMALISE:
        for i in tl.static_range(TOP_K):
            weight = tl.load(weights + r * TOP_K + i, mask=r < num_rows, other=0.0)
            tl.store(weights + r * TOP_K + i, weight / total, mask=r < num_rows)


@triton.jit(do_not_specialize=["num_pairs"])
def _group(
    chosen, pairs, starts, num_pairs, num_experts,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Order pairs by expert; within one, by pair. A pair's place is how many come before it."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    p = tl.arange(0, BLOCK_P)
    mine = tl.load(chosen + p, mask=p < num_pairs, other=num_experts)
    place = tl.zeros((BLOCK_P,), tl.int32)
    e = tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_pairs, CHUNK):
        q = first + tl.arange(0, CHUNK)
        other = tl.load(chosen + q, mask=q < num_pairs, other=num_experts + 1)
        earlier = (other[None, :] < mine[:, None]) | (
            (other[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
        )
        place += tl.sum(earlier.to(tl.int32), axis=1)
        before += tl.sum((other[None, :] < e[:, None]).to(tl.int32), axis=1)
    tl.store(pairs + place, p, mask=p < num_pairs)
    tl.store(starts + e, before, mask=e < num_experts)
    tl.store(starts + num_experts, num_pairs)


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """From router logits [tokens, experts] (or partial sums of them)."""
    parts = as_splits(logits)
    _, num_rows, num_experts = parts.shape
    device, options = logits.device, launch_options(logits.device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    block_e = triton.next_power_of_2(num_experts)
    _top_k[(triton.cdiv(num_rows, 4),)](
        parts, chosen, weights, num_rows, num_experts, parts.stride(0), parts.stride(1),
        NUM_SPLITS=parts.shape[0], TOP_K=top_k, RENORMALISE=renormalise, BLOCK_E=block_e,
        BLOCK_R=4, num_warps=4, **options,
    )  # fmt: skip
    num_pairs = num_rows * top_k
    if num_pairs > MAX_ROUTED_PAIRS:
        ordered, pairs = chosen.flatten().sort(stable=True)
        experts_at = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
        starts = torch.searchsorted(ordered, experts_at, out_int32=True)
        return Routing(weights, pairs.int(), starts)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    block_p = max(16, triton.next_power_of_2(num_pairs))
    _group[(1,)](
        chosen, pairs, starts, num_pairs, num_experts, BLOCK_P=block_p, BLOCK_E=block_e,
        CHUNK=min(64, block_p), num_warps=16 if block_p >= 256 else 4, **options,
    )  # fmt: skip
    return Routing(weights, pairs, starts)


@triton.jit
def _up(
    x, gate_up, pairs, starts, out, n_size, k_size, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of an expert's pairs, in the order of `pairs`."""
    let_next_begin(DEPENDENT)
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = gate_up + (expert * 2 * n_size + tl.minimum(n, n_size - 1))[:, None] * k_size + k[None, :]
    wait_for_inputs(DEPENDENT)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        row = tl.load(pairs + tl.minimum(m, end - 1)) // top_k
        x_at = x + row.to(tl.int64)[:, None] * k_size + k[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            gates = tl.load(w_at + at)
            ups = tl.load(w_at + n_size.to(tl.int64) * k_size + at)
            xs = tl.trans(tl.load(x_at + at))
            gate = tl.dot(gates, xs, gate, input_precision="ieee")
            up = tl.dot(ups, xs, up, input_precision="ieee")
        value = tl.trans(gate * tl.sigmoid(gate) * up)
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * n_size + n[None, :], value, mask=ok)


@triton.jit
def _down(
    hidden, down, pairs, starts, weights, out, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(hidden) of an expert's pairs, each at its own pair's place."""
    let_next_begin(DEPENDENT)
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = down + (expert * n_size + tl.minimum(n, n_size - 1))[:, None] * k_size + k[None, :]
    wait_for_inputs(DEPENDENT)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        h_at = hidden + tl.minimum(m, end - 1).to(tl.int64)[:, None] * k_size + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            weight = tl.load(w_at + at)
            hs = tl.trans(tl.load(h_at + at))
            acc = tl.dot(weight, hs, acc, input_precision="ieee")
        value = tl.trans(acc) * tl.load(weights + pair)[:, None]
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        tl.store(out + pair[:, None] * n_size + n[None, :], value, mask=ok)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
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
    block_m = 16 if num_pairs <= 8 * num_experts else 64
    inner = torch.empty(num_pairs, n_size, dtype=x.dtype, device=x.device)
    _up[(triton.cdiv(n_size, tiling.up_n), num_experts)](
        x, gate_up, routing.pairs, routing.starts, inner, n_size, hidden_size, top_k,
        BLOCK_M=block_m, BLOCK_N=tiling.up_n, BLOCK_K=tiling.up_k, num_stages=tiling.up_stages,
        num_warps=tiling.num_warps, **options,
    )  # fmt: skip
    out = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden_size, tiling.down_n), num_experts)](
        inner, down, routing.pairs, routing.starts, routing.weights, out, hidden_size, n_size,
        BLOCK_M=block_m, BLOCK_N=tiling.down_n, BLOCK_K=tiling.down_k,
        num_stages=tiling.down_stages, num_warps=tiling.num_warps, **options,
    )  # fmt: skip
    return out.view(num_tokens, top_k, hidden_size)
