"""Mixture of experts in Triton against the naive reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels.moe_pairs import reference  # isort: skip
from manyroots.kernels.moe_pairs import triton as fast  # isort: skip
from manyroots.kernels.moe_pairs.routing import Routing  # isort: skip
from manyroots.kernels.norm import triton as norm  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

TILING = fast.ExpertTiling(up_n=16, up_k=32, up_stages=2, down_n=16, down_k=16, down_stages=2)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (7, 24, 4), (40, 16, 1)])
@pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0])
def test_routing_equals_the_reference(
    most: int, tokens: int, experts: int, top_k: int, renormalise: bool
) -> None:
    logits = randn(2, tokens, experts)
    kept, fast.MAX_ROUTED_TOKENS = fast.MAX_ROUTED_TOKENS, most
    try:
        routing = fast.route(logits, top_k, renormalise=renormalise)
    finally:
        fast.MAX_ROUTED_TOKENS = kept
    expected = reference.route(logits, top_k, renormalise=renormalise)
    assert_close("lora", routing.weights, expected.weights, torch.float32)
    lists = by_expert(routing)
    assert lists == by_expert(expected)
    used_first = routing.groups.tolist()[: min(experts, tokens * top_k)]
    assert most == 0 or {expert for expert, _, _ in used_first} >= set(lists)


def by_expert(routing: Routing) -> dict[int, list[int]]:
    pairs = routing.pairs.tolist()
    return {
        expert: pairs[begin:end] for expert, begin, end in routing.groups.tolist() if end > begin
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_equal_the_reference_and_sum_up_in_the_norm(
    tokens: int, dtype: torch.dtype
) -> None:
    """40 tokens over 4 experts: more pairs per expert than one tile holds."""
    experts, hidden, inner, top_k = 4, 64, 48, 2
    x = randn(tokens, hidden, dtype=dtype)
    gate_up = randn(experts, 2 * inner, hidden, dtype=dtype, seed=1) * hidden**-0.5
    down = randn(experts, hidden, inner, dtype=dtype, seed=2) * inner**-0.5
    logits = randn(tokens, experts, seed=3)
    routing = fast.route(logits, top_k, renormalise=True)
    out = fast.experts(x, routing, gate_up, down, tiling=TILING)
    expected = reference.experts(x, routing, gate_up, down)
    assert_close("lora", out, expected, dtype)
    residual, weight = torch.zeros_like(x), torch.ones(hidden, dtype=dtype, device=DEVICE)
    norm.add_rms_norm(residual, out.transpose(0, 1), weight, 1e-6)
    assert_close("lora", residual, expected.sum(1), dtype)
