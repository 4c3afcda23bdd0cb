"""MXFP4, in which gpt-oss' experts are published: 4 bits a number, a power of two for each 32.

Takes the packed numbers and exponents of a matrix; gives it in bfloat16, in which every value that
the two can make is exact but for the smallest exponents, which no weight has.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, groups, 16], two numbers a byte, the lower half first; scales uint8
    [rows, groups], the exponents. Gives [rows, 32 * groups]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    both = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    numbers = values[both.flatten(-2).int()]
    exponents = scales.int().unsqueeze(-1) - _BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).to(torch.bfloat16)
