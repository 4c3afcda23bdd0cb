"""Who divides a normed row: the norm itself, or the one product that reads the row."""

from __future__ import annotations

import pytest
import torch
from manyroots.layers.fused import MAX_SKINNY_ROWS, FusedProducts, Product
from torch import Tensor

from manyroots.kernels.choice import kernels_for
from manyroots.kernels.lora_sites.sites import LinearSite, LoraRows, LoraTerm
from manyroots.kernels.norm.undivided import UndividedNorm
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.linear import Linear

CPU = torch.device("cpu")
HIDDEN, RANK, EPS = 128, 8, 1e-6


def products() -> FusedProducts:
    return FusedProducts(kernels_for(CPU), {})


def reader(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(HIDDEN, 48, bias=bias, dtype=dtype, device=CPU)
    torch.manual_seed(1)
    linear.weight.normal_(0, HIDDEN**-0.5)
    return linear


def product(num_rows: int, *, adapted: bool = True, dtype: torch.dtype = torch.float32) -> Product:
    torch.manual_seed(2)
    sums = torch.randn(1, num_rows, HIDDEN)
    if not adapted:
        return Product(sums, None)
    pool = torch.randn(2 * RANK * HIDDEN, dtype=dtype)
    table = torch.tensor([[0, RANK, 0, RANK, RANK * HIDDEN]])
    site = LinearSite(pool, table, torch.ones(1, 1), (HIDDEN,), RANK)
    rows = LoraRows.build([0] * num_rows, CPU, block_rows=16)
    return Product(sums, LoraTerm(torch.randn(1, num_rows, RANK), site, rows))


def normed(
    of: Product, by: Linear | None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | UndividedNorm, Tensor]:
    torch.manual_seed(3)
    residual = torch.randn(of.sums.shape[1:]).to(dtype)
    weight = torch.rand(HIDDEN).to(dtype)
    whole = products().norm_after(residual.clone(), of, weight, EPS)
    return products().norm_for(by, residual, of, weight, EPS), whole


def test_the_one_product_that_reads_rows_with_adapters_divides_and_gets_the_same() -> None:
    linear = reader()
    left, whole = normed(product(5), linear)
    assert isinstance(left, UndividedNorm)
    expected = products()(whole, linear, None).sums
    assert_close("lora", products()(left, linear, None).sums, expected, torch.float32)


@pytest.mark.parametrize(
    ("of", "by"),
    [
        pytest.param(product(5, adapted=False), reader(), id="no adapters to spread"),
        pytest.param(product(5), None, id="others read the rows, too"),
        pytest.param(product(5), reader(bias=True), id="a bias must not be divided"),
        pytest.param(product(MAX_SKINNY_ROWS + 1), reader(), id="a library computes the product"),
    ],
)
def test_otherwise_the_norm_divides(of: Product, by: Linear | None) -> None:
    given, whole = normed(of, by)
    assert isinstance(given, Tensor)
    assert torch.equal(given, whole)


def test_the_norm_divides_in_float16_whose_range_is_small() -> None:
    of = product(5, dtype=torch.float16)
    given, _ = normed(of, reader(dtype=torch.float16), dtype=torch.float16)
    assert isinstance(given, Tensor)
