"""Matrices in the order of a CPU's library: the same products, for the machines that gain by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from manyroots.kernels.gemm import reference, torch_ops
from manyroots.kernels.packed import can_pack, pack
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.weights.formats import PackedFormat
from manyroots.layers.weights.weight import Weight

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(CPU, torch.float32), reason="this machine's library packs nothing"
)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 2, 3, 31, 32, 257])
@pytest.mark.parametrize("sides", [(96, 64), (7, 40), (129, 33)])
def test_a_packed_product_equals_the_reference(num_rows: int, sides: tuple[int, int]) -> None:
    weight, bias = draw(*sides, seed=1) * sides[1] ** -0.5, draw(sides[0], seed=2)
    x = draw(num_rows, sides[1], seed=3)
    out, term = torch_ops.linear(x, pack(weight), None, None, bias)
    assert term is None
    assert_close("lora", out, reference.linear(x, weight, bias=bias)[0][0], torch.float32)


@needs_packing
def test_a_weight_that_was_filled_again_is_packed_again() -> None:
    weight = Weight(draw(48, 32, seed=1), torch.float32, PackedFormat())
    weight.pack()
    assert isinstance(weight.data, Tensor)
    weight.data.copy_(draw(48, 32, seed=2))
    weight.pack()
    x = draw(4, 32, seed=3)
    out, _ = torch_ops.linear(x, weight.operand)
    assert_close("lora", out, x @ weight.data.t(), torch.float32)


def test_other_dtypes_and_devices_are_not_packed() -> None:
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("cuda"), torch.float32)
