"""Q01: kernels that give rows in the form that a product with an FP8 weight wants: the same bits as
plain rows that are quantized to FP8 afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.triton_cases import DEVICE, DTYPES, make_rows, make_site, randn

from manyroots.kernels.activation import triton as activation  # isort: skip
from manyroots.kernels.activation.kinds import Activation  # isort: skip
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows  # isort: skip
from manyroots.kernels.gemm import reference as gemm_reference  # isort: skip
from manyroots.kernels.gemm import triton as gemm  # isort: skip
from manyroots.kernels.lora_ops import reference as sites  # isort: skip
from manyroots.kernels.norm import triton as norm  # isort: skip
from manyroots.kernels.norm.deferred import DeferredRMSNorm  # isort: skip
from manyroots.kernels.scaled import ScaledMatrix, quantize_rows  # isort: skip
from manyroots.kernels.tolerances import assert_close  # isort: skip
from manyroots.kernels.triton_fp8_rows import in_fp8  # isort: skip

COLUMNS = 272
FORMS = [
    Fp8Form(2, None), Fp8Form(2, None, keeps_values=False), Fp8Form(2, COLUMNS),
    Fp8Form(1, COLUMNS), Fp8Form(1, COLUMNS, keeps_values=False), Fp8Form(1, 128), Fp8Form(1, 64),
]  # fmt: skip
"""Groups of 64 are no program's own."""


def assert_same(found: object, plain: object, form: Fp8Form) -> None:
    assert isinstance(found, Fp8Rows)
    assert isinstance(plain, torch.Tensor)
    assert found.group == (form.group or found.group)
    assert (found.values is None) == (not form.keeps_values)
    if found.values is not None:
        # Sums of squares by another number of warps may differ in their last bit.
        assert_close("scaled", found.values, plain, plain.dtype)
        plain = found.values
    expected = in_fp8(plain, replace(form, group=found.group))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_q01_a_norm_gives_rows_as_their_reader_wants_them(
    form: Fp8Form, dtype: torch.dtype
) -> None:
    rows, n = 3, COLUMNS
    delta, weight = randn(2, rows, n, seed=1), randn(n, seed=2).to(dtype)
    kept = randn(rows, n, dtype=dtype)
    plain = norm.add_rms_norm(kept.clone(), delta, weight, 1e-6)
    residual = kept.clone()
    found = norm.add_rms_norm(residual, delta, weight, 1e-6, form=form)
    assert_same(found, plain, form)
    assert not torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "form"), [*((3, form) for form in FORMS), (66, FORMS[3]), (66, FORMS[4])]
)
def test_q01_an_activation_gives_rows_as_their_reader_wants_them(
    rows: int, form: Fp8Form, dtype: torch.dtype
) -> None:
    n = COLUMNS
    both = randn(2, rows, 2 * n, seed=1)
    plain = activation.gated(both, Activation.SILU, dtype)
    found = activation.gated(both, Activation.SILU, dtype, form=form)
    assert_same(found, plain, form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 256])
def test_q01_rows_with_adapters_are_divided_by_the_product_that_reads_them(
    group: int | None, dtype: torch.dtype
) -> None:
    """Q01: pieces of a norm are the groups that share a scale, if no others are asked for; what
    adapters read is not rounded."""
    n, inner, slots = 256, 64, (-1, 0, 0, 1)
    site, rows = make_site(inner, (n,), [(8,), (16,)], dtype), make_rows(*slots)
    lora = sites.shrink(randn(4, inner, dtype=dtype), site, rows)
    residual, delta = randn(4, n, dtype=dtype), randn(4, n, seed=3)
    weight = randn(n, seed=4).to(dtype)
    form = Fp8Form(2, group)
    plain = norm.add_norm(residual.clone(), delta, weight, 1e-6, lora)
    found = norm.add_norm(residual.clone(), delta, weight, 1e-6, lora, form)
    assert torch.equal(found.values, plain.values)
    assert torch.equal(found.squares, plain.squares)
    assert_same(found.in_fp8, plain.values, form)
    matrix = ScaledMatrix(*quantize_rows(randn(96, n, seed=5) * n**-0.5), n)
    out, _ = gemm.linear(found, matrix, tiling=gemm.Tiling(64, 64, 1, 2, 4))
    expected, _ = gemm_reference.linear(plain, matrix)
    assert_close("scaled", out[0], expected[0].to(dtype), dtype)
    assert isinstance(found, DeferredRMSNorm)
    assert out.device.type == DEVICE.type
