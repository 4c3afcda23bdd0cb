"""Mixture of experts in two launches, with or without adapters, without waiting for the host.

Same signatures as `reference.py`. `route` chooses in parallel; its last program makes the experts'
lists. The two products read each chosen expert's weights once for up to BLOCK_M of its pairs. They
leave the sum over a token's experts to the next kernel: `add_rms_norm` takes [tokens, top_k,
hidden], transposed, as partial sums.

`triton_products.py` computes both products in one launch; the adapters' parts are in
`triton_adapters.py`. All of this is for few tokens. For many tokens, `triton_order.py` sorts the
pairs and `triton_tiles.py` multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fused_moe.adapters import ExpertAdapters
from manyroots.kernels.fused_moe.routing import (
    LEAST_SUM,
    MAX_FEW_TOKENS,
    ExpertGroups,
    Routing,
    Scoring,
)
from manyroots.kernels.fused_moe.triton_adapters import add_to_scores
from manyroots.kernels.fused_moe.triton_fp4 import operand_of
from manyroots.kernels.fused_moe.triton_order import ordered
from manyroots.kernels.fused_moe.triton_products import both_products
from manyroots.kernels.fused_moe.triton_tiles import experts_in_tiles, tile_rows
from manyroots.kernels.fused_moe.weights import ExpertMatrix, ExpertWeights
from manyroots.kernels.launch import (
    as_splits,
    counters,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.lora_ops.triton import LEAST_RANKS
from manyroots.kernels.mxfp4 import TILE, Mxfp4Matrix
from manyroots.kernels.scaled import SIDE_STEP

_SOFTMAX = tl.constexpr(Scoring.SOFTMAX.value)
_OF_CHOSEN = tl.constexpr(Scoring.SOFTMAX_OF_CHOSEN.value)
_SIGMOID = tl.constexpr(Scoring.SIGMOID.value)
_SIGMOID_RENORMALISED = tl.constexpr(Scoring.SIGMOID_RENORMALISED.value)
_ROOT = tl.constexpr(Scoring.SQRT_SOFTPLUS_RENORMALISED.value)
_LEAST_SUM = tl.constexpr(LEAST_SUM)
MOST_JOINED_TOKENS = 16
"""Up to this many tokens, `experts` computes a shared block in the same launch. With more, its
weights would be read for every 16 tokens anew."""
COLUMNS = 512
"""Of A, or rows of B, that a program of adapters reads at once."""
MAX_ROUTED_TOKENS = MAX_FEW_TOKENS
"""Up to this many tokens, `route` orders the pairs itself; more go through `triton_order.py` in
tiles."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Tile sizes of the two products; found by measurement."""

    up_n: int = 64
    up_k: int = 128
    down_n: int = 128
    down_k: int = 128
    num_stages: int = 3
    num_warps: int = 4


FP4_TILING = ExpertTiling(num_stages=4)
"""For MXFP4 weights, whose tiles have 128 columns."""


@triton.jit
def _within_groups(
    left, e, SCORING: tl.constexpr, NUM_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Scores of a block of tokens, with -inf for experts in groups that a token does not choose."""
    group_of = e // GROUP_SIZE
    best = tl.full((BLOCK_R, BLOCK_E), float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        is_here = (group_of == group)[None, :]
        own = tl.where(is_here, left, float("-inf"))
        score = tl.max(own, axis=1)
        if SCORING == _SIGMOID or SCORING == _SIGMOID_RENORMALISED or SCORING == _ROOT:  # noqa: SIM109
            if GROUP_SIZE > 1:
                is_first = e[None, :] == tl.argmax(own, axis=1)[:, None]
                score += tl.max(tl.where(is_first, float("-inf"), own), axis=1)
        best = tl.where(is_here, score[:, None], best)
    is_chosen = tl.zeros((BLOCK_R, BLOCK_E), tl.int32)
    for _ in range(CHOSEN_GROUPS):
        likeliest = tl.argmax(best, axis=1) // GROUP_SIZE
        is_this = group_of[None, :] == likeliest[:, None]
        is_chosen = tl.where(is_this, 1, is_chosen)
        best = tl.where(is_this, float("-inf"), best)
    return tl.where(is_chosen > 0, left, float("-inf"))


@triton.jit
def _choose(
    logits, bias, given, chosen, weights, ranks, hidden, slots, pool, table, r, num_rows,
    num_experts, factor, in_split, in_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, LORA_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, ORDERS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, IS_GIVEN: tl.constexpr,
):  # fmt: skip
    """The most likely experts of a block of tokens; ties go to the lower index. `IS_GIVEN`: those
    that a table gives."""
    e = tl.arange(0, BLOCK_E)
    ok = (r < num_rows)[:, None] & (e < num_experts)[None, :]
    at = logits + r[:, None] * in_row + e[None, :]
    scores = tl.load(at, mask=ok, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        scores += tl.load(at + split * in_split, mask=ok, other=0.0).to(tl.float32)
    if LORA_SPLITS:
        scores = add_to_scores(
            scores, hidden, slots, pool, table, r, e, num_rows, num_experts, hidden_split,
            hidden_row, LORA_SPLITS, RANK_BLOCK,
        )  # fmt: skip
    own = scores
    if SCORING == _SIGMOID or SCORING == _SIGMOID_RENORMALISED or SCORING == _ROOT:  # noqa: SIM109
        if SCORING == _ROOT:
            own = tl.maximum(scores, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(scores)))
            own = tl.where(ok, tl.sqrt(own), 0.0)
        else:
            own = tl.where(ok, tl.sigmoid(scores), 0.0)
        scores = tl.where(ok, own, float("-inf"))
    if HAS_BIAS:
        scores += tl.load(bias + e, mask=e < num_experts, other=0.0).to(tl.float32)[None, :]
    scores = tl.where((r < num_rows)[:, None], scores, 0.0)
    if SCORING == _OF_CHOSEN:  # noqa: SIM114
        left = scores
    elif SCORING == _SIGMOID or SCORING == _SIGMOID_RENORMALISED or SCORING == _ROOT:  # noqa: SIM109
        left = scores
    else:
        left = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        left = left / tl.sum(left, axis=1)[:, None]
    if NUM_GROUPS:
        left = _within_groups(
            left, e, SCORING, NUM_GROUPS, CHOSEN_GROUPS, GROUP_SIZE, BLOCK_E, BLOCK_R
        )
    c = tl.arange(0, BLOCK_C)
    experts = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    best = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    rank = tl.full((BLOCK_R, BLOCK_E), -1, tl.int32)
    for i in range(TOP_K):
        if IS_GIVEN:
            which = tl.load(given + r * TOP_K + i, mask=r < num_rows, other=0).to(tl.int32)
        else:
            which = tl.argmax(left, axis=1)
        is_this = c[None, :] == i
        experts = tl.where(is_this, which[:, None], experts)
        is_that = e[None, :] == which[:, None]
        if SCORING == _SIGMOID or SCORING == _SIGMOID_RENORMALISED or SCORING == _ROOT:  # noqa: SIM109
            best = tl.where(is_this, tl.sum(tl.where(is_that, own, 0.0), axis=1)[:, None], best)
        else:
            best = tl.where(is_this, tl.max(left, axis=1)[:, None], best)
        rank = tl.where(is_that, i, rank)
        left = tl.where(is_that, float("-inf"), left)
    if SCORING == _OF_CHOSEN:
        best = tl.where(c[None, :] < TOP_K, best, float("-inf"))
        best = tl.exp(best - tl.max(best, axis=1)[:, None])
    if SCORING != _SOFTMAX and SCORING != _SIGMOID:
        best = best / (tl.sum(best, axis=1)[:, None] + _LEAST_SUM)
    best *= factor
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
    """Write each expert's pairs into its own list, which has room for one pair of every token."""
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
    logits, bias, given, chosen, weights, ranks, pairs, groups, hidden, slots, pool, table, counter,
    num_rows, num_experts, factor, in_split, in_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, LORA_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, NUM_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, IS_GIVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Each program chooses for a few tokens; with BLOCK_T, the last program makes the lists."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    _choose(
        logits, bias, given, chosen, weights, ranks, hidden, slots, pool, table,
        tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), num_rows, num_experts, factor,
        in_split, in_row, hidden_split, hidden_row, NUM_SPLITS, LORA_SPLITS, RANK_BLOCK, TOP_K,
        SCORING, HAS_BIAS, BLOCK_C, BLOCK_E, BLOCK_R, BLOCK_T > 0, NUM_GROUPS, CHOSEN_GROUPS,
        GROUP_SIZE, IS_GIVEN,
    )  # fmt: skip
    if BLOCK_T:
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(counter, 0)
            _list(ranks, pairs, groups, num_rows, num_experts, TOP_K, BLOCK_E, BLOCK_T)


def route(
    scores: Tensor,
    top_k: int,
    lora: LoraTerm | None = None,
    *,
    scoring: Scoring,
    bias: Tensor | None = None,
    factor: float = 1.0,
    groups: ExpertGroups | None = None,
    chosen: Tensor | None = None,
) -> Routing:
    """Choose experts from a router's scores [tokens, experts] (or partial sums of them), the
    adapters' additions and the router's bias [experts]. All weights are multiplied with `factor`.
    `groups`: restricts a token's experts to a few groups. `chosen` [tokens, top_k]: the
    experts, where a table gives them."""
    parts = as_splits(scores)
    num_splits, num_rows, num_experts = parts.shape
    device = scores.device
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    found = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    is_small = num_rows <= MAX_ROUTED_TOKENS
    ranks, pairs = torch.empty(
        2, num_experts * num_rows if is_small else 0, dtype=torch.int32, device=device
    )
    lists = torch.empty(num_experts, 3, dtype=torch.int32, device=device)
    # With adapters, each row of a block has its own B in registers.
    block_r, num_warps = (2, 4) if num_rows <= 16 else (8, 8)
    if lora is not None:
        block_r, num_warps = 1, 8
    if lora is None:
        adapters, hidden_strides, lora_splits = (parts, found, parts, found), (0, 0), 0
    else:
        hidden, site = lora.hidden, lora.site
        adapters = (hidden, lora.rows.slots, site.pool, site.table)
        hidden_strides, lora_splits = (hidden.stride(0), hidden.stride(1)), hidden.shape[0]
    _route[(triton.cdiv(num_rows, block_r),)](
        parts, parts if bias is None else bias, found if chosen is None else chosen.contiguous(),
        found, weights, ranks, pairs, lists, *adapters, counters(device), num_rows, num_experts,
        factor, parts.stride(0), parts.stride(1), *hidden_strides,
        NUM_SPLITS=num_splits, LORA_SPLITS=lora_splits, RANK_BLOCK=LEAST_RANKS, TOP_K=top_k,
        SCORING=scoring.value, HAS_BIAS=bias is not None, BLOCK_C=triton.next_power_of_2(top_k),
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_R=block_r,
        BLOCK_T=max(16, triton.next_power_of_2(num_rows)) if is_small else 0,
        NUM_GROUPS=0 if groups is None else groups.count,
        CHOSEN_GROUPS=0 if groups is None else groups.chosen,
        GROUP_SIZE=1 if groups is None else num_experts // groups.count,
        IS_GIVEN=chosen is not None, num_warps=num_warps, **launch_options(device),
    )  # fmt: skip
    if is_small:
        return Routing(weights, pairs, lists, found)
    rows = tile_rows(num_rows * top_k, num_experts)
    return ordered(found, weights, num_experts, tile_rows=rows)


def experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    adapters: ExpertAdapters | None = None,
    shared: ExpertWeights | None = None,
    *,
    tiling: ExpertTiling | None = None,
) -> Tensor:
    """The terms of each token's output, float32 [top_k, tokens, hidden]: each pair's weighted
    output. `shared`: one expert that all tokens go through, with weight 1, whose output is one
    more term. It is for up to MOST_JOINED_TOKENS and plain weights."""
    if shared is not None and len(x) > MOST_JOINED_TOKENS:
        raise ValueError("a shared block is computed with few tokens")
    if shared is not None and adapters is not None and adapters.shared is None:
        raise ValueError("adapters of experts and of a shared block are computed together")
    cut = tiling or (FP4_TILING if weights.is_fp4 else ExpertTiling())
    if not (_fits(weights.gate_up, cut.up_k) and _fits(weights.down, cut.down_k)):
        weights = weights.plain(x.dtype)
    if routing.tiles is not None:
        by_token = experts_in_tiles(x, routing, weights, adapters)
    else:
        by_token = _both(x, routing, weights, adapters, shared, cut)
    return by_token.transpose(0, 1)


def _fits(matrix: ExpertMatrix, block_k: int) -> bool:
    """Whether FP8 is read in words: rows are whole 16-byte loads, and tiles of this many columns
    have one scale per row. For MXFP4, whether tiles match the stored layout."""
    if isinstance(matrix, Tensor):
        return True
    if isinstance(matrix, Mxfp4Matrix):
        return block_k == TILE
    has_one = matrix.has_row_scales or matrix.group % block_k == 0
    return has_one and matrix.shape[-1] % SIDE_STEP == 0


def _both(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    adapters: ExpertAdapters | None,
    shared: ExpertWeights | None,
    cut: ExpertTiling,
) -> Tensor:
    """Both products in one launch."""
    num_experts, hidden_size, n_size = weights.down.shape
    num_tokens, top_k = routing.weights.shape
    used, block_m = _blocks(num_tokens, top_k, num_experts)
    up_tiles = triton.cdiv(n_size, cut.up_n)
    down_tiles = triton.cdiv(hidden_size, cut.down_n)
    inner = torch.empty(num_tokens * top_k, n_size, dtype=x.dtype, device=x.device)
    *gate_up, up_scaled = operand_of(weights.gate_up, x)
    *down, down_scaled = operand_of(weights.down, x)
    of_shared, shared_size, shared_tiles, num_terms = (x, x, x), 0, 0, top_k
    if shared is not None:
        assert isinstance(shared.gate_up, Tensor)
        assert isinstance(shared.down, Tensor)
        assert shared.activation is weights.activation
        shared_size, num_terms = shared.down.shape[2], top_k + 1
        shared_tiles = triton.cdiv(shared_size, cut.up_n)
        own = torch.empty(num_tokens, shared_size, dtype=x.dtype, device=x.device)
        of_shared = (shared.gate_up, shared.down, own)
    out = torch.empty(num_tokens, num_terms, hidden_size, dtype=torch.float32, device=x.device)
    num_programs = used * (up_tiles + down_tiles)
    if shared is not None:
        num_programs += shared_tiles + down_tiles
    around: tuple[Tensor, ...] = (x,) * 13
    if adapters is not None:
        num_programs += 3 * num_tokens * num_terms
        up_size = 2 * num_tokens * (top_k * n_size + shared_size)
        around = _around(routing, adapters, (up_size, out.numel()))
    both_products[(num_programs,)](
        x, *gate_up, *down, weights.up_bias_or(x), weights.down_bias_or(x), routing.pairs,
        routing.groups, routing.weights, inner, out, counters(x.device), *of_shared, *around,
        num_tokens, used * up_tiles, n_size, hidden_size, shared_size,
        UP_SCALED=up_scaled, DOWN_SCALED=down_scaled, KIND=weights.activation.value,
        HAS_UP_BIAS=weights.gate_up_bias is not None, HAS_DOWN_BIAS=weights.down_bias is not None,
        EVEN_UP=hidden_size % cut.up_k == 0, EVEN_DOWN=n_size % cut.down_k == 0,
        TOP_K=top_k, UP_TILES=up_tiles, DOWN_TILES=down_tiles, BLOCK_M=block_m, UP_N=cut.up_n,
        UP_K=cut.up_k, DOWN_N=cut.down_n, DOWN_K=cut.down_k, SHARED_TILES=shared_tiles,
        EVEN_SHARED=shared_size % cut.down_k == 0, HAS_ADAPTERS=adapters is not None,
        GROUPS_POW=triton.next_power_of_2(num_experts), COLUMNS=COLUMNS,
        num_stages=cut.num_stages, num_warps=cut.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def _blocks(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """The number of experts that a step may use, and of an expert's pairs that a program takes at
    once."""
    num_pairs = num_tokens * top_k
    return min(num_experts, num_pairs), 16 if num_pairs <= 8 * num_experts else 64


def _around(
    routing: Routing, adapters: ExpertAdapters, sizes: tuple[int, int]
) -> tuple[Tensor, ...]:
    """The adapters' inputs to both products, and room of `sizes` for what they add to each."""
    own = adapters.gate_up, adapters.down
    others = own if adapters.shared is None else adapters.shared
    room = torch.empty(sum(sizes), dtype=torch.float32, device=routing.weights.device)
    sites = [part for site in (*own, *others) for part in (site.table, site.scalings)]
    first = (adapters.rows.slots, routing.experts, own[0].pool)
    return *first, *room.split(sizes), *sites
