"""Norms with torch's operators against the naive reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyroots.kernels.norm import reference, torch_ops
from manyroots.kernels.tolerances import assert_close

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_weight_wide", [False, True])
def test_rms_norm_is_computed_in_float32_and_leaves_its_input_alone(
    is_weight_wide: bool, dtype: torch.dtype
) -> None:
    weight_dtype = torch.float32 if is_weight_wide else dtype
    x, weight = randn(5, 3, 200, dtype=dtype), randn(200, dtype=weight_dtype, seed=2)
    before = x.clone()
    out = torch_ops.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_close("norm", out, reference.rms_norm(x, weight, EPS), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("shape", [(7, 96), (1, 7, 96), (3, 7, 96)])
def test_add_rms_norm_equals_the_reference(
    shape: tuple[int, ...], has_post: bool, dtype: torch.dtype
) -> None:
    """Whole products and partial sums. What is added may have a norm of its own; weights of such
    models are in float32."""
    residual, other = randn(7, 96, dtype=dtype), randn(7, 96, dtype=dtype)
    weight_dtype = torch.float32 if has_post else dtype
    delta, weight = randn(*shape, dtype=dtype, seed=1), randn(96, dtype=weight_dtype, seed=2)
    post = randn(96, seed=3) if has_post else None
    factor = 0.3 if len(shape) == 3 else 1.0
    out = torch_ops.add_rms_norm(residual, delta, weight, EPS, None, post, factor)
    expected = reference.add_rms_norm(other, delta, weight, EPS, None, post, factor)
    assert out.dtype == dtype
    assert_close("norm", out, expected, dtype)
    assert_close("norm", residual, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 3])
def test_two_products_are_added_and_parts_of_a_product_are_normalised(
    splits: int, dtype: torch.dtype
) -> None:
    shape = (splits, 7, 120) if splits else (7, 120)
    also, weight = randn(*shape, dtype=dtype, seed=1)[..., 24:], randn(96, dtype=dtype, seed=2)
    delta = randn(2, 7, 96, dtype=dtype, seed=3)
    residual, other = randn(7, 96, dtype=dtype), randn(7, 96, dtype=dtype)
    out = torch_ops.add_rms_norm(residual, delta, weight, EPS, also=also)
    expected = reference.add_rms_norm(other, delta, weight, EPS, also=also)
    assert_close("norm", out, expected, dtype)
    assert_close("norm", residual, other, dtype)
    assert not torch.equal(residual, randn(7, 96, dtype=dtype) + delta.sum(0))
    normed = torch_ops.sum_rms_norm(also, weight, EPS, torch.float32)
    assert normed.dtype == torch.float32
    assert_close("norm", normed, reference.sum_rms_norm(also, weight, EPS, torch.float32), dtype)
