"""Experts of many tokens: pairs in order and products in tiles, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from tests.unit.kernels.test_expert_adapters_triton import (  # isort: skip
    EXPERTS,
    HIDDEN,
    PER_EXPERT,
    RANKS,
    SHARED_OUTER,
    TOP_K,
    make_adapters,
    weights,
)
from manyroots.kernels.fused_moe import reference, triton_order, triton_tiles  # isort: skip
from manyroots.kernels.fused_moe import triton as fast  # isort: skip
from manyroots.kernels.fused_moe.routing import Scoring  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 3, 1), (50, 24, 4), (300, 4, 3), (150, 5, 2)]
)
def test_pairs_lie_by_expert_in_the_order_of_tokens_and_tiles_cover_them(
    tokens: int, experts: int, top_k: int, tile_rows: int
) -> None:
    expected = reference.route(randn(tokens, experts), top_k, scoring=Scoring.SOFTMAX_RENORMALISED)
    routing = triton_order.ordered(expected.experts, expected.weights, experts, tile_rows=tile_rows)
    assert torch.equal(routing.pairs, expected.pairs)
    by_expert = expected.groups[expected.groups[:, 0].argsort()]
    assert torch.equal(routing.groups, by_expert)
    tiles = routing.tiles
    assert tiles is not None
    count = int(tiles.count)
    assert count <= len(tiles.places)
    assert tiles.places[:count].tolist() == [
        [expert, first, min(first + tile_rows, end)]
        for expert, begin, end in by_expert.tolist()
        for first in range(begin, end, tile_rows)
    ]


def test_an_expert_that_nobody_chose_has_no_tile() -> None:
    chosen = torch.tensor([[3], [1], [3]], dtype=torch.int32, device=DEVICE)
    routing = triton_order.ordered(chosen, torch.ones(3, 1), 5, tile_rows=16)
    assert routing.tiles is not None
    assert routing.tiles.places[: int(routing.tiles.count)].tolist() == [[1, 0, 1], [3, 1, 3]]
    assert routing.pairs.tolist() == [1, 0, 2]


SLOTS = {
    "one adapter": [0] * 150,
    "base rows between": [*[-1] * 40, *[0] * 3, *[1] * 60, *[-1] * 30],
    "base rows alone": [-1] * 130,
}


def routed(num_tokens: int) -> fast.Routing:
    routing = fast.route(
        randn(num_tokens, EXPERTS, seed=3), TOP_K, scoring=Scoring.SOFTMAX_RENORMALISED
    )
    assert routing.tiles is not None, "too few tokens for tiles"
    return routing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [triton_tiles.SMALL_ROWS, triton_tiles.LARGE_ROWS])
def test_experts_of_many_tokens_equal_the_reference(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "tile_rows", lambda *_: rows)
    x = randn(200, HIDDEN, dtype=dtype)
    routing = routed(len(x))
    out = fast.experts(x, routing, weights(dtype))
    assert out.dtype == torch.float32
    assert_close("experts", out, reference.experts(x, routing, weights(dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [PER_EXPERT, SHARED_OUTER])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("step", SLOTS)
def test_adapters_of_many_tokens_equal_the_reference(
    step: str, ranks: str, shares: str, dtype: torch.dtype
) -> None:
    slots = SLOTS[step]
    x = randn(len(slots), HIDDEN, dtype=dtype)
    adapters = make_adapters(slots, RANKS[ranks], shares, dtype)
    routing = routed(len(slots))
    out = fast.experts(x, routing, weights(dtype), adapters)
    expected = reference.experts(x, routing, weights(dtype), adapters)
    assert_close("expert_lora", out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_beyond_one_block_are_added_up(dtype: torch.dtype) -> None:
    slots = [*[0] * 70, *[1] * 70]
    x = randn(len(slots), HIDDEN, dtype=dtype)
    adapters = make_adapters(slots, [(80, 8, 72), (8, 128, 8)], PER_EXPERT, dtype)
    routing = routed(len(slots))
    out = fast.experts(x, routing, weights(dtype), adapters)
    expected = reference.experts(x, routing, weights(dtype), adapters)
    assert_close("expert_lora", out, expected, dtype)
