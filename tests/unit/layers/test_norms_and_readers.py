"""Where a normed row is divided: in the norm itself, or in the one product that reads the row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.kernels.choice import reference_kernels
from manyroots.kernels.lora_ops.reference import expanded
from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows, LoraTerm
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.norm import RMSNorm
from manyroots.layers.step import Step
from tests.unit.layers.contexts import cpu_context

CPU = torch.device("cpu")
HIDDEN, RANK, EPS, MOST_ROWS = 128, 8, 1e-6, 64
REFERENCE = reference_kernels()
NOTHING = Step(ropes=(), memories=(), lora=None)


def is_for(num_rows: int, weight: Tensor, *, has_adapters: bool = False) -> bool:
    """As on a GPU."""
    return num_rows <= MOST_ROWS


KERNELS: Any = SimpleNamespace(
    norm=REFERENCE.norm,
    lora_ops=REFERENCE.lora_ops,
    gemm=SimpleNamespace(is_for=is_for, linear=REFERENCE.gemm.linear),
)


def reader(*, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(
        HIDDEN, {"": 48}, cpu_context(HIDDEN, dtype, kernels=KERNELS), bias=False, side=None
    )
    torch.manual_seed(1)
    linear.weight.data.normal_(0, HIDDEN**-0.5)
    return linear


def product(
    num_rows: int, *, adapted: bool = True, dtype: torch.dtype = torch.float32, rank: int = RANK
) -> DeferredOutput:
    torch.manual_seed(2)
    sums = torch.randn(1, num_rows, HIDDEN)
    if not adapted:
        return DeferredOutput(sums)
    pool = torch.randn(2 * rank * HIDDEN, dtype=dtype)
    table = torch.tensor([[0, rank, 0, rank, rank * HIDDEN]])
    site = LinearSite(pool, table, torch.ones(1, 1), (HIDDEN,), rank)
    rows = LoraRows.build([0] * num_rows, CPU, block_rows=16)
    return DeferredOutput(sums, LoraTerm(torch.randn(1, num_rows, rank), site, rows))


def normed(
    of: DeferredOutput, by: Linear | None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor | DeferredRMSNorm, Tensor]:
    torch.manual_seed(3)
    residual = torch.randn(of.sums.shape[1:]).to(dtype)
    norm = RMSNorm(HIDDEN, cpu_context(HIDDEN, dtype, eps=EPS, kernels=KERNELS))
    norm.weight.uniform_()
    whole = norm.rows_after(residual.clone(), replace(of, sums=of.sums.clone()))
    return norm.after(residual, of, by), whole


def test_the_one_product_that_reads_rows_with_adapters_divides_and_gets_the_same() -> None:
    linear = reader()
    left, whole = normed(product(5), linear)
    assert isinstance(left, DeferredRMSNorm)
    expected = linear(whole, NOTHING).sums
    assert_close("lora", linear(left, NOTHING).sums, expected, torch.float32)


@pytest.mark.parametrize(
    ("of", "by"),
    [
        pytest.param(product(5, adapted=False), reader(), id="no adapters to spread"),
        pytest.param(product(5), None, id="others read the rows, too"),
        pytest.param(product(MOST_ROWS + 1), reader(), id="a library computes the product"),
        pytest.param(
            replace(product(5), post=torch.linspace(0, 1, HIDDEN)),
            reader(),
            id="it has a norm of its own",
        ),
    ],
)
def test_otherwise_the_norm_divides(of: DeferredOutput, by: Linear | None) -> None:
    given, whole = normed(of, by)
    assert isinstance(given, Tensor)
    assert torch.equal(given, whole)


def test_the_norm_divides_in_float16_whose_range_is_small() -> None:
    of = product(5, dtype=torch.float16)
    given, _ = normed(of, reader(dtype=torch.float16), dtype=torch.float16)
    assert isinstance(given, Tensor)


def test_what_a_norm_would_read_too_much_of_is_expanded_before() -> None:
    few, many = product(5, rank=16), product(5, rank=24)
    assert few.for_many(KERNELS) is few
    before = many.sums[0].clone()
    whole = many.for_many(KERNELS)
    assert whole.lora is None
    assert many.lora is not None
    assert_close("lora", whole.sums, before + expanded(many.lora), torch.float32)
