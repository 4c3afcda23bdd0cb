"""Q03: 4-bit blocks of GGUF files, found in their numbers and multiplied as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from manyroots.kernels.blocks import (
    GROUP,
    MIDDLE,
    can_multiply_blocks,
    find_blocks,
    group_sums,
    pack_blocks,
)
from manyroots.kernels.gemm import torch_ops
from manyroots.kernels.tolerances import assert_close
from manyroots.layers.weights.formats import PackedFormat
from manyroots.layers.weights.weight import Weight

CPU = torch.device("cpu")
needs_operator = pytest.mark.skipif(
    not can_multiply_blocks(CPU, torch.float32), reason="this machine has no such operator"
)


def round_rows(x: Tensor) -> Tensor:
    """Rows rounded to 8 bits as the operator does it."""
    low = x.amin(1, keepdim=True).clamp(max=0.0)
    high = x.amax(1, keepdim=True).clamp(min=0.0)
    step = (high - low) / 255
    step = torch.where(step > 0, step, torch.ones_like(step))
    zero = (-128 - low / step).round()
    return ((x / step).round() + zero).clamp(-128, 127).sub(zero) * step


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_in_a_file(numbers: Tensor, kind: str) -> Tensor:
    """Through the gguf package and back."""
    from gguf import GGMLQuantizationType, quants

    if kind == "Q4_1 with a narrow range":  # as files made with an importance matrix have them
        groups = numbers.view(numbers.shape[0], -1, GROUP)
        scale = groups.std(-1, keepdim=True).half().float()
        codes = (groups / scale + 7).round().clamp(1, 13)
        return (codes * scale + (groups.mean(-1, keepdim=True)).half().float()).view(numbers.shape)
    chosen = GGMLQuantizationType[kind]
    raw = quants.quantize(numbers.numpy(), chosen)
    return torch.from_numpy(np.array(quants.dequantize(raw, chosen), dtype=np.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_1 with a narrow range"])
def test_q03_codes_are_found_in_the_numbers_of_a_file(kind: str) -> None:
    numbers = as_in_a_file(draw(70, 96, seed=1), kind)
    numbers[3, 32:64] = 0.25  # a group of equal numbers
    blocks = find_blocks(numbers)
    assert blocks is not None
    assert int(blocks.codes.max()) <= 15
    codes = blocks.codes.view(70, -1, GROUP).float() - MIDDLE
    again = codes * blocks.scales[..., None] + blocks.offsets[..., None]
    assert_close("blocks_found", again.view(70, 96), numbers, torch.float32)


def test_q03_numbers_of_other_kinds_are_told() -> None:
    assert find_blocks(draw(9, 64, seed=1)) is None
    assert find_blocks(as_in_a_file(draw(9, 64, seed=1), "Q8_0")) is None
    assert find_blocks(as_in_a_file(draw(9, 64, seed=1), "Q4_1")[:, :48]) is None
    late = as_in_a_file(draw(2000, 32, seed=1), "Q4_1")
    late[1999] = draw(32, seed=2)
    assert find_blocks(late) is None


@needs_operator
@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
@pytest.mark.parametrize("sides", [(96, 64), (72, 576), (576, 1536)])
def test_q03_a_product_of_blocks_equals_the_reference(
    num_rows: int, sides: tuple[int, int]
) -> None:
    weight = as_in_a_file(draw(*sides, seed=1) * sides[1] ** -0.5, "Q4_1")
    bias, x = draw(sides[0], seed=2), draw(num_rows, sides[1], seed=3) * 3
    matrix, blocks = pack_blocks(weight), find_blocks(weight)
    assert matrix is not None
    assert blocks is not None
    out, term = torch_ops.linear(x, matrix, None, None, bias)
    assert term is None
    scales = blocks.scales.to(torch.bfloat16).float()[..., None]
    codes = (blocks.codes.view(sides[0], -1, GROUP).float() - MIDDLE) * scales
    wanted = round_rows(x) @ codes.view(sides).t() + group_sums(x) @ blocks.offsets.t() + bias
    assert_close("blocks", out, wanted, torch.float32)
    assert torch.equal(matrix.plain(torch.float32), weight)


@needs_operator
def test_q03_a_row_does_not_depend_on_the_others() -> None:
    matrix = pack_blocks(as_in_a_file(draw(64, 96, seed=1), "Q4_0"))
    assert matrix is not None
    x = draw(7, 96, seed=2)
    together = matrix.times(x, None)
    assert_close("blocks", together[4:5], matrix.times(x[4:5], None), torch.float32)


@needs_operator
def test_q03_a_weight_of_another_kind_stays_in_float32() -> None:
    weight = Weight(draw(48, 32, seed=1), torch.float32, PackedFormat(as_blocks=True))
    weight.pack()
    x = draw(4, 32, seed=3)
    assert isinstance(weight.data, Tensor)
    assert_close("lora", torch_ops.linear(x, weight.operand)[0], x @ weight.data.t(), torch.float32)
