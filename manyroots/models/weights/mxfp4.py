"""MXFP4, in which gpt-oss' experts are published: 4 bits a number, a power of two for each 32.

Takes (checkpoint name, tensor) pairs, in which a projection is `....weight_mxfp4`, and where they
go; gives the same, with those that go to unquantized numbers as such. In bfloat16 every value that
bits and powers can make is exact but for the smallest powers, which no weight has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from manyroots.kernels.mxfp4 import values_of
from manyroots.layers.weights.fill import Fill
from manyroots.layers.weights.mxfp4 import KIND


def joined(blocks: Tensor, scales: Tensor) -> Tensor:
    """A matrix's packed numbers [rows, groups, 16] and exponents [rows, groups] as one."""
    return torch.cat((blocks, scales.unsqueeze(-1)), dim=-1)


def as_numbers_where_needed(
    weights: Iterable[tuple[str, Tensor]], fills: Mapping[str, Fill]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint that may have some in MXFP4."""
    for name, tensor in weights:
        stem, _, kind = name.rpartition(".")
        if kind == KIND and name not in fills:
            yield f"{stem}.weight", unpacked(tensor[..., :-1], tensor[..., -1])
        else:
            yield name, tensor


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, groups, 16], two numbers a byte, the lower half first; scales uint8
    [rows, groups], the exponents. Gives bfloat16 [rows, 32 * groups]."""
    codes = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-3)
    return values_of(codes, scales).to(torch.bfloat16)
