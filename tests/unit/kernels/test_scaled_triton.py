"""Q01: products with FP8 weights in Triton, scales inside, against the naive references."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.fp8_rows import Fp8Form  # isort: skip
from manyroots.kernels.gemm import reference as gemm_reference  # isort: skip
from manyroots.kernels.gemm import torch_ops as gemm_ops  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.fused_moe import reference as moe_reference  # isort: skip
from manyroots.kernels.fused_moe import torch_ops as moe_ops  # isort: skip
from manyroots.kernels.fused_moe import triton as moe  # isort: skip
from manyroots.kernels.fused_moe.routing import Scoring  # isort: skip
from manyroots.kernels.fused_moe.weights import ExpertWeights  # isort: skip
from manyroots.kernels.scaled import LARGEST, ScaledMatrix, _nearest, quantize_rows  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from manyroots.kernels.triton_fp8_rows import in_fp8  # isort: skip

RENORMALISED = Scoring.SOFTMAX_RENORMALISED
TILING = moe.ExpertTiling(up_n=16, up_k=64, down_n=16, down_k=64, num_stages=2)


def scaled(*shape: int, group: int | None = None, seed: int = 1) -> ScaledMatrix:
    """Numbers of FP8, and scales that differ widely, so that a wrong one shows."""
    *stack, rows, columns = shape
    data = (randn(*shape, seed=seed) * 0.5).to(torch.float8_e4m3fn)
    width = columns if group is None else group
    scales = randn(*stack, rows, -(-columns // width), seed=seed + 50).exp() * columns**-0.5
    return ScaledMatrix(data, scales, width)


def test_plain_numbers_are_each_byte_times_its_own_scale() -> None:
    matrix = scaled(3, 20, group=8)
    plain = matrix.plain(torch.float32)
    for row, column in ((0, 0), (1, 7), (1, 8), (2, 19)):
        scale = matrix.scales[row, column // 8]
        assert plain[row, column] == matrix.data[row, column].float() * scale


def test_q01_rows_are_rounded_by_their_largest_number() -> None:
    rows = randn(4, 64)
    rows[1] = 0.0
    rows[2] *= 1e4
    data, scales = quantize_rows(rows)
    back = data.float() * scales
    assert torch.equal(back[1], torch.zeros(64, device=DEVICE))
    # Half of the last of three bits of the mantissa, or of the smallest step there is.
    bound = rows.abs() * 2**-4 + scales * 2**-10
    assert bool(((back - rows).abs() <= bound).all())
    largest = data.float().abs().amax(1).tolist()
    assert largest[1] == 0.0
    assert all(LARGEST / 2 <= largest[row] <= LARGEST for row in (0, 2, 3))


def test_q01_the_scale_with_the_least_error_is_taken() -> None:
    rows = randn(64, 256)
    data, scales = quantize_rows(rows)
    simple = rows.abs().amax(1, keepdim=True) / LARGEST
    before = ((rows / simple).to(torch.float8_e4m3fn).float() * simple - rows).square().sum(1)
    after = (data.float() * scales - rows).square().sum(1)
    assert bool((after <= before).all())
    assert after.sum() < 0.95 * before.sum()


def test_q01_the_nearest_numbers_are_those_of_the_conversion() -> None:
    """Q01: ties and the smallest numbers, too."""
    numbers = torch.cat((torch.linspace(-LARGEST, LARGEST, 100_001), randn(10_000).cpu() * 2**-8))
    ties = torch.arange(-64.0, 64.0) * 2**-10
    for each in (numbers, ties, 64 * ties):
        assert torch.equal(_nearest(each), each.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 72, 256), (7, 40, 320), (33, 64, 272)])
@pytest.mark.parametrize("splits", [1, 2])
def test_q01_a_product_equals_the_reference(
    splits: int, rows: int, n: int, k: int, group: int | None, dtype: torch.dtype
) -> None:
    x, matrix, bias = randn(rows, k, dtype=dtype), scaled(n, k, group=group), randn(n, seed=9)
    bias = bias.to(dtype)
    expected, _ = gemm_reference.linear(x, matrix, bias=bias)
    cut = gemm.Tiling(64, 64, splits, 2, 4)
    for given in (x, in_fp8(x, Fp8Form(2, 128, keeps_values=False))):
        out, _ = gemm.linear(given, matrix, bias=bias, tiling=cut)
        assert_close("scaled", out.float().sum(0), expected[0], dtype)
    if DEVICE.type == "cpu":
        whole, _ = gemm_ops.linear(x, matrix, bias=bias)
        assert_close("lora", whole, expected[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_q01_adapters_read_the_same_rows_and_are_not_scaled(dtype: torch.dtype) -> None:
    """Q01: an adapter's weights are not quantized, and what it reads is not, either."""
    k, slots = 128, (-1, 0, 0, 1)
    x, matrix = randn(4, k, dtype=dtype), scaled(48, k)
    site, rows = make_site(k, (32, 16), [(8, 16), (40, 8)], dtype), make_rows(*slots)
    cut = gemm.Tiling(64, 64, 1, 2, 4)
    _, plain = gemm.linear(x, matrix.plain(dtype), site, rows, tiling=cut)
    out, shrunk = gemm.linear(x, matrix, site, rows, tiling=cut)
    expected, _ = gemm_reference.linear(x, matrix, site, rows)
    assert_close("scaled", out.float().sum(0), expected[0], dtype)
    assert shrunk is not None
    assert plain is not None
    for row, slot in enumerate(slots):
        rank = 0 if slot < 0 else int(site.table[slot, 1])
        assert torch.equal(shrunk.hidden[:, row, :rank], plain.hidden[:, row, :rank])


def test_q01_groups_that_tiles_would_cut_are_left_to_the_library() -> None:
    assert gemm.is_for(8, scaled(16, 256))
    assert gemm.is_for(8, scaled(16, 256, group=128))
    assert not gemm.is_for(8, scaled(16, 256, group=64))
    assert not gemm.is_for(8, scaled(16, 200))
    assert not gemm.is_for(65, scaled(16, 256))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 128, 8])
@pytest.mark.parametrize("most", [moe.MAX_ROUTED_TOKENS, 0], ids=["one launch", "tiles"])
def test_q01_experts_equal_the_reference(
    most: int, group: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 8 columns are no tile's: the weights are multiplied as plain numbers."""
    monkeypatch.setattr(moe, "MAX_ROUTED_TOKENS", most)
    experts, hidden, inner, top_k, tokens = 4, 144, 144, 2, 9
    x = randn(tokens, hidden, dtype=dtype)
    weights = ExpertWeights(
        scaled(experts, 2 * inner, hidden, group=group),
        scaled(experts, hidden, inner, group=group, seed=2),
        randn(experts, 2 * inner, seed=5).to(dtype),
    )
    routing = moe.route(randn(tokens, experts, seed=3), top_k, scoring=RENORMALISED)
    assert (routing.tiles is None) == (most > 0)
    expected = moe_reference.experts(x, routing, weights)
    out = moe.experts(x, routing, weights, tiling=TILING)
    if most or not weights.has_fp8_tiles:
        assert_close("lora", out, expected, dtype)
    else:
        assert_close("fp8_experts", out, expected, dtype)
        off = (out - expected).norm() / expected.norm()
        assert_close("fp8_experts_mean", off, torch.zeros_like(off), dtype)
    if DEVICE.type == "cpu" and most:  # which rounds no rows
        own = moe_ops.route(randn(tokens, experts, seed=3), top_k, scoring=RENORMALISED)
        assert_close("lora", moe_ops.experts(x, own, weights), expected.sum(0), dtype)


def test_q01_stages_of_adapters_in_float32_fit_into_shared_memory() -> None:
    """Q01: beside a weight in FP8, tiles of A have four times its bytes."""
    tiling = gemm.Tiling(64, 128, 1, 4, 4)
    assert gemm.stages_that_fit(tiling, 64, 4, 1) == 4
    assert gemm.stages_that_fit(tiling, 64, 4, 4) == 3
    assert gemm.stages_that_fit(tiling, 64, 2, 2) == 4
