"""Adapters of experts in Triton against the naive reference, and that against the CPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, randn
from tests.unit.kernels.triton_cases import make_site as make_linear_site

from manyroots.kernels.fused_moe import reference  # isort: skip
from manyroots.kernels.fused_moe import triton as fast  # isort: skip
from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertAdapters, ExpertSite  # isort: skip
from manyroots.kernels.fused_moe.routing import Scoring  # isort: skip
from manyroots.kernels.fused_moe.weights import ExpertWeights  # isort: skip
from manyroots.kernels.lora_ops.sites import LinearSite  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 48, 2
TILING = fast.ExpertTiling(up_n=16, up_k=32, down_n=16, down_k=16, num_stages=2)
SHARED_OUTER = "shared outer"
PER_EXPERT = "per expert"


def make_site(
    in_features: int,
    part_sizes: tuple[int, ...],
    ranks: list[tuple[int, ...]],
    shares: str,
    dtype: torch.dtype,
) -> ExpertSite:
    """`ranks[slot][part]` may be 0. Shared outer: one A where gate and up are, else one B."""
    pieces: list[Tensor] = [randn(8, dtype=dtype)]  # so that no offset is 0
    used = 8

    def put(is_shared: bool, *shape: int) -> tuple[int, int]:
        nonlocal used
        count, size = 1 if is_shared else EXPERTS, shape[0] * shape[1]
        piece = (
            randn(count, *shape, dtype=dtype, seed=used).flatten() * 0.5 * max(1, shape[1]) ** -0.5
        )
        pieces.append(piece)
        used += len(piece)
        return used - len(piece), 0 if is_shared else size

    is_outer = shares == SHARED_OUTER
    table = []
    for slot_ranks in ranks:
        entry = []
        for size, rank in zip(part_sizes, slot_ranks, strict=True):
            a = put(is_outer and len(part_sizes) == 2, rank, in_features)
            b = put(is_outer and len(part_sizes) == 1, size, rank)
            entry += [*a, rank, *b] if rank else [0] * PART_WIDTH
        table.append(entry)
    return ExpertSite(
        pool=torch.cat(pieces),
        table=torch.tensor(table, dtype=torch.int64, device=DEVICE),
        scalings=randn(len(ranks), len(part_sizes)).abs() + 0.5,
        part_sizes=part_sizes,
        max_rank=max(max(slot_ranks) for slot_ranks in ranks),
    )


def make_adapters(
    slots: list[int],
    ranks: list[tuple[int, int, int]],
    shares: str,
    dtype: torch.dtype,
    *,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> ExpertAdapters:
    """`ranks`: of gate, up and down, by slot."""
    up = make_site(hidden, (inner, inner), [r[:2] for r in ranks], shares, dtype)
    down = make_site(inner, (hidden,), [r[2:] for r in ranks], shares, dtype)
    # One pool for both, as a model has.
    pool = torch.cat((up.pool, down.pool))
    moved = down.table.clone()
    moved[:, [0, 3]] += len(up.pool)
    return ExpertAdapters(
        gate_up=ExpertSite(pool, up.table, up.scalings, up.part_sizes, up.max_rank),
        down=ExpertSite(pool, moved, down.scalings, down.part_sizes, down.max_rank),
        rows=make_rows(*slots),
    )


def weights(dtype: torch.dtype) -> ExpertWeights:
    gate_up = randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, seed=1) * HIDDEN**-0.5
    down = randn(EXPERTS, HIDDEN, INNER, dtype=dtype, seed=2) * INNER**-0.5
    return ExpertWeights(gate_up, down)


TILES, ALL_SIZES = "more pairs per expert than a tile", "ranks of all sizes"
STEPS = {
    "one row": [0],
    "base rows between": [-1, 0, 1, 1, -1],
    "only base rows": [-1, -1],
    TILES: [*[0] * 20, *[1] * 9, *[-1] * 11],
}
RANKS = {
    "one rank": [(16, 16, 16), (16, 16, 16)],
    ALL_SIZES: [(8, 24, 40), (32, 8, 16)],
    "parts left alone": [(0, 16, 0), (8, 0, 8)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [PER_EXPERT, SHARED_OUTER])
@pytest.mark.parametrize(
    ("step", "ranks"),
    # Tiles don't depend on ranks, and take the interpreter long.
    [(step, ranks) for step in STEPS for ranks in RANKS if step != TILES or ranks == ALL_SIZES],
)
def test_experts_with_adapters_equal_the_reference(
    step: str, ranks: str, shares: str, dtype: torch.dtype
) -> None:
    """Pair by pair as in a decode; in tiles as in a prefill: `test_moe_tiles_triton.py`."""
    slots = STEPS[step]
    x = randn(len(slots), HIDDEN, dtype=dtype)
    adapters = make_adapters(slots, RANKS[ranks], shares, dtype)
    routing = fast.route(
        randn(len(slots), EXPERTS, seed=3), TOP_K, scoring=Scoring.SOFTMAX_RENORMALISED
    )
    expected = reference.experts(x, routing, weights(dtype), adapters)
    for _ in range(2):  # the counters must be as they were
        out = fast.experts(x, routing, weights(dtype), adapters, tiling=TILING)
        assert_close("expert_lora", out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_base_row_is_the_same_with_adapters_beside_it(dtype: torch.dtype) -> None:
    slots = [-1, 0, 1, -1]
    x = randn(len(slots), HIDDEN, dtype=dtype)
    adapters = make_adapters(slots, RANKS["one rank"], PER_EXPERT, dtype)
    routing = fast.route(
        randn(len(slots), EXPERTS, seed=3), TOP_K, scoring=Scoring.SOFTMAX_RENORMALISED
    )
    out = fast.experts(x, routing, weights(dtype), adapters, tiling=TILING)
    base = fast.experts(x, routing, weights(dtype), tiling=TILING)
    for row, slot in enumerate(slots):
        assert torch.equal(out[:, row], base[:, row]) == (slot < 0)


@pytest.mark.parametrize("shares", [PER_EXPERT, SHARED_OUTER])
def test_the_reference_adds_b_times_a_times_scaling(shares: str) -> None:
    """W + scaling * B A merged into each expert's weights gives the same."""
    slots = [0, 0, 0]
    x = randn(len(slots), HIDDEN)
    base = weights(torch.float32)
    adapters = make_adapters(slots, [(8, 16, 24)], shares, torch.float32)
    routing = reference.route(
        randn(len(slots), EXPERTS, seed=3), TOP_K, scoring=Scoring.SOFTMAX_RENORMALISED
    )
    up = base.gate_up + torch.stack([_delta(adapters.gate_up, e, HIDDEN) for e in range(EXPERTS)])
    down = base.down + torch.stack([_delta(adapters.down, e, INNER) for e in range(EXPERTS)])
    out = reference.experts(x, routing, base, adapters)
    expected = reference.experts(x, routing, ExpertWeights(up, down))
    assert_close("expert_lora", out, expected, torch.float32)


def _delta(site: ExpertSite, expert: int, in_features: int) -> Tensor:
    entries = site.table[0].tolist()
    products = []
    for part, size in enumerate(site.part_sizes):
        a, a_step, rank, b, b_step = entries[PART_WIDTH * part :][:PART_WIDTH]
        first = site.pool[a + expert * a_step :][: rank * in_features].view(rank, in_features)
        second = site.pool[b + expert * b_step :][: size * rank].view(size, rank)
        products.append(site.scalings[0, part] * second @ first)
    return torch.cat(products)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slots", "inner"), [([0], 40), ([-1, 0, 1, 1, -1], 64), ([-1] * 2, 96)])
@pytest.mark.parametrize("ranks", RANKS)
def test_adapters_of_a_shared_block_are_in_its_term(
    ranks: str, slots: list[int], inner: int, dtype: torch.dtype
) -> None:
    """Beside those of experts, in the same launch; of any width, unlike the experts'."""
    x = randn(len(slots), HIDDEN, dtype=dtype)
    own = make_adapters(slots, RANKS[ranks], PER_EXPERT, dtype)
    linear = [
        make_linear_site(HIDDEN, (inner, inner), [(16, 8), (0, 24)], dtype, seed=2),
        make_linear_site(inner, (HIDDEN,), [(24,), (8,)], dtype, seed=3),
    ]
    adapters = in_one_pool(own, linear)
    shared = ExpertWeights(
        randn(1, 2 * inner, HIDDEN, dtype=dtype, seed=5) * HIDDEN**-0.5,
        randn(1, HIDDEN, inner, dtype=dtype, seed=6) * inner**-0.5,
    )
    routing = fast.route(
        randn(len(slots), EXPERTS, seed=3), TOP_K, scoring=Scoring.SOFTMAX_RENORMALISED
    )
    expected = reference.experts(x, routing, weights(dtype), adapters, shared)
    assert torch.equal(expected[:TOP_K], reference.experts(x, routing, weights(dtype), own))
    base = reference.experts(x, routing, weights(dtype), None, shared)
    assert [not torch.equal(a, b) for a, b in zip(expected[TOP_K], base[TOP_K], strict=True)] == [
        slot >= 0 for slot in slots
    ]
    for _ in range(2):  # the counters must be as they were
        out = fast.experts(x, routing, weights(dtype), adapters, shared, tiling=TILING)
        assert_close("expert_lora", out, expected, dtype)
    out = fast.experts(x, routing, weights(dtype), own, tiling=TILING)
    assert_close("expert_lora", out, expected[:TOP_K], dtype)


def in_one_pool(experts: ExpertAdapters, linear: list[LinearSite]) -> ExpertAdapters:
    """Adapters of a shared block, too, as a model has them."""
    pool, sites = experts.gate_up.pool, []
    for site in linear:
        table, start = site.table.clone(), len(pool)
        table[:, [0, *range(4, table.shape[1], 3)]] += start
        pool = torch.cat((pool, site.pool))
        sites.append(replace(site, table=table))
    gate_up, down = (replace(site, pool=pool) for site in (experts.gate_up, experts.down))
    first, second = (replace(site, pool=pool) for site in sites)
    return ExpertAdapters(gate_up, down, experts.rows, (first, second))
