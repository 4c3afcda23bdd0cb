"""Q01: products of many rows with FP8 weights in Triton, the rows rounded too, against the naive
reference."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, randn

from manyroots.kernels import fp8_rows, triton_fp8_rows  # isort: skip
from manyroots.kernels.fp8_rows import Fp8Form  # isort: skip
from manyroots.kernels.scaled_gemm import reference  # isort: skip
from manyroots.kernels.scaled_gemm import triton as scaled_gemm  # isort: skip
from manyroots.kernels.scaled import LARGEST, ScaledMatrix  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip


def scaled(n: int, k: int, group: int | None) -> ScaledMatrix:
    """Numbers of FP8, and scales that differ widely, so that a wrong one shows."""
    data = (randn(n, k, seed=1) * 0.5).to(torch.float8_e4m3fn)
    width = k if group is None else group
    scales = randn(n, -(-k // width), seed=2).exp() * k**-0.5
    return ScaledMatrix(data, scales, width)


def rows(num_rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Of sizes that differ as much as tokens' do; one is zero, one has a number that stands out."""
    x = randn(num_rows, k) * randn(num_rows, 1, seed=3).exp()
    x[1] = 0.0
    x[2, 5] = 300.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("k", "parts"), [(384, 1), (144, 1), (144, 2), (1280, 2)])
def test_q01_rows_are_rounded_to_the_references_bits(
    k: int, parts: int, group: int | None, dtype: torch.dtype
) -> None:
    x, form = rows(9, k, dtype), Fp8Form(parts, group or k)
    expected = fp8_rows.in_fp8(x, form)
    found = triton_fp8_rows.in_fp8(x, form)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.data[0].view(torch.uint8), expected.data[0].view(torch.uint8))
    # A row's largest number is the largest there is, or more than half of it where another scale
    # suits the rest better; of a row of zeros, none.
    largest = found.data[0, 0].float().abs().max()
    assert largest == LARGEST or (parts == 1 and group is None and largest > LARGEST / 2)
    assert not found.data[:, 1].float().any()
    # What is left is computed with one rounding less where the two products are one instruction.
    assert_close("scaled", found.plain(), expected.plain(), torch.float32)
    assert len(found.data) == parts
    bound = 2.0 ** -(4 * parts) * x.float().abs() + found.scales.amax(1, keepdim=True) * 2.0**-10
    assert bool(((found.plain() - x.float()).abs() <= bound).all())


def test_q01_a_row_in_one_number_has_the_scale_that_suits_it() -> None:
    """Q01: the squared error is less than with the smallest scale, for rows with a few large
    numbers by more than a tenth."""
    x = rows(64, 512, torch.float32)
    x[:, ::97] *= 9.0
    smallest = (x.abs().amax(1, keepdim=True) / LARGEST).clamp(fp8_rows.LEAST_SCALE)
    plainly = (x / smallest).to(torch.float8_e4m3fn).float() * smallest
    found = fp8_rows.in_fp8(x, Fp8Form(1, 512)).plain()
    assert (found - x).square().sum() < 0.9 * (plainly - x).square().sum()


def test_q01_a_row_that_is_no_number_stays_none() -> None:
    x = rows(4, 144, torch.float32)
    x[3, 7] = torch.nan
    found = scaled_gemm.linear(x, scaled(32, 144, None))
    assert bool(found[3].isnan().all())
    assert bool(found[:3].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(70, 72, 256), (130, 144, 144)])
def test_q01_a_product_of_many_rows_equals_the_reference(
    num_rows: int, n: int, k: int, group: int | None, dtype: torch.dtype
) -> None:
    x, matrix, bias = rows(num_rows, k, dtype), scaled(n, k, group), randn(n, seed=9).to(dtype)
    expected = reference.linear(x, matrix, bias)
    assert scaled_gemm.is_for(matrix, dtype)
    assert_close("scaled", scaled_gemm.linear(x, matrix, bias), expected, dtype)
    if DEVICE.type == "cuda":  # where some of these were the library's
        rounded = triton_fp8_rows.in_fp8(x, Fp8Form(1, matrix.group)).rounded
        assert_close("scaled", scaled_gemm.in_tiles(rounded, matrix, bias, dtype), expected, dtype)


def test_q01_what_no_tile_can_hold_is_multiplied_as_plain_numbers() -> None:
    assert not scaled_gemm.is_for(scaled(16, 256, 64), torch.float32)
    assert not scaled_gemm.is_for(scaled(16, 200, None), torch.float32)
