"""Experts as gpt-oss has them, in Triton: biases, a clamped activation, sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from tests.unit.kernels.test_expert_adapters_triton import (  # isort: skip
    EXPERTS,
    PER_EXPERT,
    RANKS,
    SHARED_OUTER,
    TILING,
    TOP_K,
    make_adapters,
)
from manyroots.kernels.activation.kinds import CLAMP_LIMIT, Activation  # isort: skip
from manyroots.kernels.fused_moe import reference  # isort: skip
from manyroots.kernels.fused_moe import triton as fast  # isort: skip
from manyroots.kernels.fused_moe.routing import Routing, Scoring  # isort: skip
from manyroots.kernels.fused_moe.weights import ExpertWeights  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

HIDDEN, INNER = 72, 56
"""Tiles end inside of a row: at 32 and 16 in `TILING`, at 128 in the one of a GPU."""
PATHS = pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0], ids=["few", "tiles"])
TILINGS = pytest.mark.parametrize("tiling", [TILING, None], ids=["small", "a GPU's"])


def weights(
    dtype: torch.dtype, activation: Activation = Activation.CLAMPED_SWIGLU
) -> ExpertWeights:
    """Of which some gates and ups are cut off, and biases are as large as products."""
    return ExpertWeights(
        randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype, seed=1) * 4 * HIDDEN**-0.5,
        randn(EXPERTS, HIDDEN, INNER, dtype=dtype, seed=2) * 0.3 * INNER**-0.5,
        randn(EXPERTS, 2 * INNER, dtype=dtype, seed=5),
        randn(EXPERTS, HIDDEN, dtype=dtype, seed=6),
        activation,
    )


def routed(num_tokens: int) -> Routing:
    scores, bias = randn(num_tokens, EXPERTS, seed=3), randn(EXPERTS, seed=4)
    return fast.route(scores, TOP_K, scoring=Scoring.SOFTMAX_OF_CHOSEN, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@PATHS
@TILINGS
def test_experts_with_biases_equal_the_reference(
    tiling: fast.ExpertTiling | None, most: int, tokens: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    x = randn(tokens, HIDDEN, dtype=dtype)
    routing = routed(tokens)
    out = fast.experts(x, routing, weights(dtype), tiling=tiling)
    assert_close("lora", out, reference.experts(x, routing, weights(dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [PER_EXPERT, SHARED_OUTER])
@pytest.mark.parametrize("slots", [[0], [*[-1] * 3, *[0] * 20, 1, 1]])
@PATHS
@TILINGS
def test_biases_come_before_adapters_and_adapters_before_the_activation(
    tiling: fast.ExpertTiling | None, most: int, slots: list[int], shares: str,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    x = randn(len(slots), HIDDEN, dtype=dtype)
    ranks = RANKS["ranks of all sizes"]
    adapters = make_adapters(slots, ranks, shares, dtype, hidden=HIDDEN, inner=INNER)
    routing = routed(len(slots))
    out = fast.experts(x, routing, weights(dtype), adapters, tiling=tiling)
    expected = reference.experts(x, routing, weights(dtype), adapters)
    assert_close("expert_lora", out.sum(0), expected.sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", Activation)
@PATHS
def test_every_activation_of_experts_equals_the_reference(
    most: int, kind: Activation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    x = randn(3, HIDDEN, dtype=dtype) * 0.5
    routing, given = routed(3), weights(dtype, kind)
    expected = reference.experts(x, routing, given)
    assert_close("lora", fast.experts(x, routing, given, tiling=TILING), expected, dtype)


def test_rows_behind_a_matrix_are_not_read() -> None:
    """The next row, or NaN after the last one, follows a row's end."""
    x = torch.full((3, HIDDEN), float("nan"), device=DEVICE)
    x[:2] = randn(2, HIDDEN)
    routing = routed(2)
    out = fast.experts(x[:2], routing, weights(torch.float32), tiling=TILING)
    expected = reference.experts(x[:2], routing, weights(torch.float32))
    assert_close("lora", out, expected, torch.float32)


def test_the_reference_is_what_gpt_oss_computes() -> None:
    """One token through one expert, written out."""
    given = weights(torch.float32)
    x, one = randn(1, HIDDEN), torch.ones(1, 1, device=given.down.device)
    expert = 2
    groups = torch.tensor([[expert, 0, 1]], dtype=torch.int32, device=DEVICE)
    pairs = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    routing = Routing(one * 0.25, pairs, groups, groups[:, :1])
    assert given.gate_up_bias is not None
    assert given.down_bias is not None
    gate, up = (given.gate_up[expert] @ x[0] + given.gate_up_bias[expert]).chunk(2)
    assert gate.max() > CLAMP_LIMIT
    assert up.abs().max() > CLAMP_LIMIT
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    inner = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    y = given.down[expert] @ inner + given.down_bias[expert]
    assert_close("lora", reference.experts(x, routing, given)[0, 0], 0.25 * y, torch.float32)
