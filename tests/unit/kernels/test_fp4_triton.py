"""Q02: experts in MXFP4, multiplied as they are, against the naive reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from tests.unit.kernels.test_expert_adapters_triton import (  # isort: skip
    EXPERTS,
    RANKS,
    SHARED_OUTER,
    TOP_K,
    make_adapters,
)
from manyroots.kernels.activation.kinds import Activation  # isort: skip
from manyroots.kernels.fused_moe import reference  # isort: skip
from manyroots.kernels.fused_moe import torch_ops  # isort: skip
from manyroots.kernels.fused_moe import triton as fast  # isort: skip
from manyroots.kernels.fused_moe.routing import Routing, Scoring  # isort: skip
from manyroots.kernels.fused_moe.weights import ExpertWeights  # isort: skip
from manyroots.kernels.mxfp4 import Mxfp4Matrix, codes_of, quantize, words_of  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip

HIDDEN, INNER = 160, 32
"""Of whole groups, but not of whole tiles."""
TILING = fast.ExpertTiling(up_n=64, down_n=64, num_stages=2)
PATHS = pytest.mark.parametrize("most", [fast.MAX_ROUTED_TOKENS, 0], ids=["few", "tiles"])


def matrix(*shape: int, seed: int) -> Mxfp4Matrix:
    """Every code, and powers of two that differ, so that a wrong one shows."""
    *stack, columns = shape
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*stack, columns // 2), generator=draw, dtype=torch.uint8)
    groups = (*stack, columns // 32)
    exponents = torch.randint(120, 126, groups, generator=draw, dtype=torch.uint8)
    made = Mxfp4Matrix.empty(*shape, device=DEVICE)
    made.take(blocks, exponents)
    return made


def weights(dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        matrix(EXPERTS, 2 * INNER, HIDDEN, seed=1),
        matrix(EXPERTS, HIDDEN, INNER, seed=2),
        randn(EXPERTS, 2 * INNER, dtype=dtype, seed=5),
        randn(EXPERTS, HIDDEN, dtype=dtype, seed=6),
        Activation.CLAMPED_SWIGLU,
    )


def routed(num_tokens: int) -> Routing:
    scores = randn(num_tokens, EXPERTS, seed=3)
    return fast.route(scores, TOP_K, scoring=Scoring.SOFTMAX_OF_CHOSEN)


def equal_sums(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Sums of some hundred terms as large as the largest."""
    size = expected.abs().max()
    assert_close("lora", out / size, expected / size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 12] if DEVICE.type == "cpu" else [1, 5, 40])
@PATHS
def test_q02_experts_equal_the_reference(
    most: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    x = randn(tokens, HIDDEN, dtype=dtype)
    routing, given = routed(tokens), weights(dtype)
    expected = reference.experts(x, routing, given)
    tilings = (TILING,) if DEVICE.type == "cpu" else (TILING, None)
    for tiling in tilings:
        equal_sums(fast.experts(x, routing, given, tiling=tiling), expected, dtype)
    if DEVICE.type == "cpu" and most:
        scores = randn(tokens, EXPERTS, seed=3)
        own = torch_ops.route(scores, TOP_K, scoring=Scoring.SOFTMAX_OF_CHOSEN)
        equal_sums(torch_ops.experts(x, own, given), expected.sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@PATHS
def test_q02_experts_of_deepseek_v4_equal_the_reference(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q02: without biases, and with another activation."""
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    own = weights(dtype)
    given = ExpertWeights(own.gate_up, own.down, activation=Activation.CLIPPED_SILU)
    x, routing = randn(3, HIDDEN, dtype=dtype), routed(3)
    out = fast.experts(x, routing, given, tiling=TILING)
    equal_sums(out, reference.experts(x, routing, given), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@PATHS
def test_q02_adapters_add_to_them_as_to_plain_numbers(
    most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "MAX_ROUTED_TOKENS", most)
    slots = [-1, 0, 1]
    x = randn(len(slots), HIDDEN, dtype=dtype)
    ranks = RANKS["ranks of all sizes"]
    adapters = make_adapters(slots, ranks, SHARED_OUTER, dtype, hidden=HIDDEN, inner=INNER)
    routing, given = routed(len(slots)), weights(dtype)
    out = fast.experts(x, routing, given, adapters, tiling=TILING)
    equal_sums(out.sum(0), reference.experts(x, routing, given, adapters).sum(0), dtype)


def test_q02_every_code_and_every_power_is_exact_in_bfloat16() -> None:
    """Q02: also the number 0.5, which has no exponent of its own, and both zeros."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16)
    assert torch.equal(codes_of(words_of(codes)), codes)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    exponents = torch.arange(28, 155, dtype=torch.uint8)[:, None].expand(-1, 16)
    kept = Mxfp4Matrix.empty(127, 512, device=DEVICE)
    kept.take(blocks, exponents)
    exact = kept.plain(torch.float32)
    assert torch.equal(kept.plain(torch.bfloat16).float(), exact)
    assert exact.unique().numel() > 127


def test_q02_numbers_that_are_in_mxfp4_stay_as_they_are() -> None:
    """Q02: and others go to the nearest, of two equally near ones to the even."""
    kept = matrix(8, 96, seed=4)
    again = Mxfp4Matrix.empty(8, 96, device=DEVICE)
    again.take(*quantize(kept.plain(torch.bfloat16)))
    assert torch.equal(again.plain(torch.float32), kept.plain(torch.float32))
    row = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.3, 4.9, 0.0, -6.0])
    again = Mxfp4Matrix.empty(1, 32, device=DEVICE)
    again.take(*quantize(torch.nn.functional.pad(row, (0, 20))[None]))
    rounded = [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -0.5, 4.0, 0.0, -6.0]
    assert again.plain(torch.float32)[0, :12].tolist() == rounded


def test_q02_an_expert_takes_its_bits_and_its_powers() -> None:
    """Q02: of gpt-oss-20b's, 17 bits for 4 numbers but for what fills up the last tile of a row."""
    kept = Mxfp4Matrix.empty(1, 2880, 2880, device=torch.device("meta"))
    assert kept.nbytes == 2880 * 2944 * 17 // 32
    assert kept.nbytes < 0.28 * 2880 * 2880 * 2
