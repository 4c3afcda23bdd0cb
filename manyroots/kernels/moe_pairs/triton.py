"""Mixture of experts in two launches, or four with adapters, without a word from the host.

Same signatures as `reference.py`. `route` chooses in parallel, and the last program to choose
makes the experts' lists. The two products read each chosen expert's weights once for up to BLOCK_M
of its pairs, and leave the sum over a token's experts to the next kernel: [tokens, top_k, hidden],
transposed, is what `add_rms_norm` takes as partial sums. Without adapters, both are one launch of
`triton_products.py`. With adapters each is a kernel of its own, here, made of the same tiles; what
adapters need of them is in `triton_adapters.py`.
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
from manyroots.kernels.moe_pairs.adapters import ExpertAdapters, ExpertSite
from manyroots.kernels.moe_pairs.routing import Routing
from manyroots.kernels.moe_pairs.triton_adapters import (
    EXPAND_N,
    SHRINK_N,
    activate,
    add_adapters,
    expand_tile,
    shrink_pairs,
    shrink_tile,
)
from manyroots.kernels.moe_pairs.triton_order import ordered
from manyroots.kernels.moe_pairs.triton_products import (
    both_products,
    down_product,
    gate_and_up,
    group_at,
)
from manyroots.kernels.moe_pairs.triton_tiles import experts_in_tiles, tile_rows

MAX_ROUTED_TOKENS = 128
"""Most tokens whose pairs `route` orders itself; more go through `triton_order.py` and in tiles."""
MAX_PAIRWISE_TOKENS = 128
"""Most tokens whose adapters are computed pair by pair. With more, pairs share matrices."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How the two products are cut up; found by measurement."""

    up_n: int = 64
    up_k: int = 128
    up_stages: int = 3
    down_n: int = 64
    down_k: int = 128
    down_stages: int = 3
    down_alone_n: int = 128
    """Where both products are one launch, which has `up_stages`; instead of `down_n`."""
    num_warps: int = 4
    activate_n: int = 128
    """With adapters alone: columns of a pair that one program takes between the products."""


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
    rows = tile_rows(num_rows * top_k, num_experts)
    return ordered(chosen, weights, num_experts, tile_rows=rows)


@triton.jit(do_not_specialize=["num_pairs", "shrink_rows"])
def _up(
    x, gate_up, pairs, groups, out, shrunk, slots, experts, pool, table, scalings, n_size, k_size,
    top_k, num_pairs, max_rank, shrink_rows,
    PAIRWISE: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of an expert's pairs, each at its own pair's place.

    With adapters pair by pair: gate and up as they are, and what the adapters shrink x to.
    """
    group = tl.program_id(1)
    if PAIRWISE:
        if group < shrink_rows:
            shrink_tile(
                x, shrunk, slots, experts, pool, table, scalings,
                group * tl.num_programs(0) + tl.program_id(0), num_pairs, top_k, k_size, max_rank,
                2, BLOCK_K, DEPENDENT,
            )  # fmt: skip
            return
        group -= shrink_rows
    else:
        let_next_begin(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(DEPENDENT)
    if PAIRWISE:
        let_next_begin(DEPENDENT)
    expert, begin, end = group_at(groups, group)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        gate, up = gate_and_up(
            x, gate_up, expert, pair // top_k, m < end, n, n_size, k_size, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        if RANK:
            gate = add_adapters(
                gate, shrunk, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                0, 2, RANK,
            )  # fmt: skip
            up = add_adapters(
                up, shrunk, pool, table, slots, pair // top_k, pair, m < end, expert, n, n_size,
                1, 2, RANK,
            )  # fmt: skip
        if PAIRWISE:
            to = out + pair[:, None] * 2 * n_size + n[None, :]
            tl.store(to, tl.trans(gate), mask=ok)
            tl.store(to + n_size, tl.trans(up), mask=ok)
        else:
            value = tl.trans(gate * tl.sigmoid(gate) * up)
            tl.store(out + pair[:, None] * n_size + n[None, :], value, mask=ok)


@triton.jit(do_not_specialize=["num_tokens", "expand_rows"])
def _down(
    hidden, down, pairs, groups, weights, out, shrunk, slots, experts, pool, table, n_size, k_size,
    num_tokens, max_rank, expand_rows,
    TOP_K: tl.constexpr, BLOCK_P: tl.constexpr, NUM_SPLITS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(hidden) of an expert's pairs, each at its own pair's place.

    With adapters pair by pair (NUM_SPLITS, of what they shrunk the activations to): what they add
    to each token, too.
    """
    let_next_begin(DEPENDENT)
    group = tl.program_id(1)
    places: tl.constexpr = TOP_K + (1 if NUM_SPLITS else 0)
    if NUM_SPLITS:
        if group < expand_rows:
            expand_tile(
                out, shrunk, weights, experts, slots, pool, table,
                group * tl.num_programs(0) + tl.program_id(0), num_tokens, n_size, max_rank,
                TOP_K, BLOCK_P, NUM_SPLITS, DEPENDENT,
            )  # fmt: skip
            return
        group -= expand_rows
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(DEPENDENT)
    expert, begin, end = group_at(groups, group)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + tl.minimum(m, end - 1)).to(tl.int64)
        acc = down_product(
            hidden, down, expert, pair, m < end, n, n_size, k_size, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if RANK:
            acc = add_adapters(
                acc, shrunk, pool, table, slots, pair // TOP_K, pair, m < end, expert, n, n_size,
                0, 1, RANK,
            )  # fmt: skip
        value = tl.trans(acc) * tl.load(weights + pair)[:, None]
        ok = (m < end)[:, None] & (n < n_size)[None, :]
        place = pair // TOP_K * places + pair % TOP_K
        tl.store(out + place[:, None] * n_size + n[None, :], value, mask=ok)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters | None = None,
    *,
    tiling: ExpertTiling | None = None,
) -> Tensor:
    """What adds up to each token's output, float32 [tokens, top_k, hidden]: each pair's weighted
    output. Where adapters are computed pair by pair, what they add is one more behind the last.

    gate_up is [experts, 2 n, hidden] (gates first), down is [experts, hidden, n].
    """
    if routing.tiles is not None:
        return experts_in_tiles(x, routing, gate_up, down, adapters)
    cut = tiling or ExpertTiling()
    num_tokens, top_k = routing.weights.shape
    if adapters is None and num_tokens <= MAX_ROUTED_TOKENS:
        return _both(x, routing, gate_up, down, cut)
    num_experts, hidden_size, n_size = down.shape
    num_pairs = num_tokens * top_k
    used, block_m = _blocks(num_tokens, top_k, num_experts)
    inner = torch.empty(num_pairs, n_size, dtype=x.dtype, device=x.device)
    around = _Around.of(inner, routing, adapters, hidden_size, cut)
    options = launch_options(x.device)
    if adapters is not None and around.up_rank:
        _shrink(x, around.of_up[0], routing, adapters.gate_up, adapters.slots, used)
    _up[(triton.cdiv(n_size, cut.up_n), around.shrink_rows + used)](
        x, gate_up, routing.pairs, routing.groups, around.product, *around.of_up, n_size,
        hidden_size, top_k, num_pairs, around.up_max_rank, around.shrink_rows,
        PAIRWISE=around.num_splits > 0, RANK=around.up_rank, BLOCK_M=block_m, BLOCK_N=cut.up_n,
        BLOCK_K=cut.up_k, num_stages=cut.up_stages, num_warps=cut.num_warps, **options,
    )  # fmt: skip
    if adapters is not None and around.down_rank:
        _shrink(inner, around.of_down[0], routing, adapters.down, adapters.slots, used)
    elif adapters is not None:
        _activate(around, inner, routing, adapters, cut)
    places = top_k + 1 if around.num_splits else top_k
    out = torch.empty(num_tokens, places, hidden_size, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden_size, cut.down_n), around.expand_rows + used)](
        inner, down, routing.pairs, routing.groups, routing.weights, out, *around.of_down,
        hidden_size, n_size, num_tokens, around.max_rank, around.expand_rows,
        TOP_K=top_k, BLOCK_P=triton.next_power_of_2(top_k), NUM_SPLITS=around.num_splits,
        RANK=around.down_rank, BLOCK_M=block_m, BLOCK_N=cut.down_n, BLOCK_K=cut.down_k,
        num_stages=cut.down_stages, num_warps=cut.num_warps, **options,
    )  # fmt: skip
    return out


def _both(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, cut: ExpertTiling) -> Tensor:
    """The base model's experts: both products in one launch."""
    num_experts, hidden_size, n_size = down.shape
    num_tokens, top_k = routing.weights.shape
    used, block_m = _blocks(num_tokens, top_k, num_experts)
    up_tiles = triton.cdiv(n_size, cut.up_n)
    down_tiles = triton.cdiv(hidden_size, cut.down_alone_n)
    inner = torch.empty(num_tokens * top_k, n_size, dtype=x.dtype, device=x.device)
    out = torch.empty(num_tokens, top_k, hidden_size, dtype=torch.float32, device=x.device)
    both_products[(used * (up_tiles + down_tiles),)](
        x, gate_up, down, routing.pairs, routing.groups, routing.weights, inner, out,
        counters(x.device), used * up_tiles, n_size, hidden_size,
        TOP_K=top_k, UP_TILES=up_tiles, DOWN_TILES=down_tiles, BLOCK_M=block_m, UP_N=cut.up_n,
        UP_K=cut.up_k, DOWN_N=cut.down_alone_n, DOWN_K=cut.down_k, num_stages=cut.up_stages,
        num_warps=cut.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def _blocks(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """How many experts a step may use, and how many pairs of one a program takes at once."""
    num_pairs = num_tokens * top_k
    used = min(num_experts, num_pairs) if num_tokens <= MAX_ROUTED_TOKENS else num_experts
    return used, 16 if num_pairs <= 8 * num_experts else 64


@dataclass(frozen=True, slots=True)
class _Around:
    """What the two products are given of adapters; of no account where there are none."""

    product: Tensor
    """What `_up` writes: activations [num_pairs, n], or pair by pair float32 [num_pairs, 2 n]."""
    of_up: tuple[Tensor, ...]
    """First what x is shrunk to, float32 [num_pairs, ranks of gate and up]."""
    of_down: tuple[Tensor, ...]
    """First what activations are shrunk to, float32 [splits, num_pairs, ranks of down]."""
    up_rank: int = 0
    """How many ranks each part has there, where they are shrunk before the product; else 0."""
    down_rank: int = 0
    num_splits: int = 0
    """Where adapters are computed pair by pair: sums that `of_down` is in; else 0."""
    shrink_rows: int = 0
    """Then, rows of further tiles in the grid of `_up`: the first ones, so that what ends last is
    short."""
    expand_rows: int = 0
    """And in that of `_down`."""
    up_max_rank: int = 1
    max_rank: int = 1

    @classmethod
    def of(
        cls,
        inner: Tensor,
        routing: Routing,
        adapters: ExpertAdapters | None,
        hidden_size: int,
        cut: ExpertTiling,
    ) -> _Around:
        if adapters is None:
            return cls(inner, (inner,) * 6, (inner,) * 5)
        num_pairs, n_size = inner.shape
        up, down, slots = adapters.gate_up, adapters.down, adapters.slots
        of_up = (slots, routing.experts, up.pool, up.table, up.scalings)
        of_down = (slots, routing.experts, down.pool, down.table)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=inner.device)

        if len(slots) > MAX_PAIRWISE_TOKENS:
            up_rank, down_rank = _block_of(up.max_rank), _block_of(down.max_rank)
            return cls(
                product=inner,
                of_up=(empty(num_pairs, 2 * up_rank), *of_up),
                of_down=(empty(num_pairs, down_rank), *of_down),
                up_rank=up_rank,
                down_rank=down_rank,
            )
        num_splits = triton.cdiv(n_size, cut.activate_n)
        shrink_tiles = triton.cdiv(num_pairs * up.width, SHRINK_N.value)
        expand_tiles = len(slots) * triton.cdiv(hidden_size, EXPAND_N.value)
        return cls(
            product=empty(num_pairs, 2 * n_size),
            of_up=(empty(num_pairs, up.width), *of_up),
            of_down=(empty(num_splits, num_pairs, down.width), *of_down),
            num_splits=num_splits,
            shrink_rows=triton.cdiv(shrink_tiles, triton.cdiv(n_size, cut.up_n)),
            expand_rows=triton.cdiv(expand_tiles, triton.cdiv(hidden_size, cut.down_n)),
            up_max_rank=up.max_rank,
            max_rank=down.max_rank,
        )


def _block_of(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def _shrink(
    x: Tensor, shrunk: Tensor, routing: Routing, site: ExpertSite, slots: Tensor, used: int
) -> None:
    """x is of tokens, or of pairs."""
    top_k = routing.weights.shape[1]
    shrink_pairs[(site.num_parts, used)](
        x, shrunk, site.pool, site.table, site.scalings, slots, routing.pairs, routing.groups,
        x.shape[1], top_k,
        BY_PAIR=site.num_parts == 1, NUM_PARTS=site.num_parts, RANK=_block_of(site.max_rank),
        BLOCK_M=16, BLOCK_K=16 * (8 if x.shape[1] % 128 == 0 else 1),
        num_warps=4, num_stages=4, **launch_options(x.device),
    )  # fmt: skip


def _activate(
    around: _Around, inner: Tensor, routing: Routing, adapters: ExpertAdapters, cut: ExpertTiling
) -> None:
    num_pairs, n_size = inner.shape
    up, down = adapters.gate_up, adapters.down
    activate[(num_pairs, around.num_splits)](
        around.product, around.of_up[0], inner, around.of_down[0], adapters.slots, routing.experts,
        down.pool, up.table, down.table, down.scalings, num_pairs, routing.weights.shape[1], n_size,
        up.max_rank, down.max_rank,
        BLOCK_N=cut.activate_n, num_warps=4, **launch_options(inner.device),
    )  # fmt: skip
