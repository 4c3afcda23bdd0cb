"""Multiplies a matrix of 4-bit numbers in the form that a GGUF file stores.

Each row has a scale and an offset for every 32 columns: w = scale * (code - 8) + offset. Q4_0, Q4_1
and Q4_K have this form. It is detected from the numbers: each group of 32 lies on at most 16 evenly
spaced values. torch's operator (KleidiAI's, on Arm) multiplies scales and codes with rows that it
rounds to 8 bits, each by its own minimum and maximum. The offsets add one more small product, with
the sums of each row's 32 columns. The operator rounds scales to bfloat16.

Measured on a Neoverse-N1 (one thread, processor time, 576 x 3072, GFLOP/s; float32 by rows for one
row and packed for more, see `packed.py`):

    rows of x       1      2      4      8     32    192
    float32      10.8   14.3   22.4   27.6   34.4   37.3
    4 bits       41.0   43.3   45.0   45.5   45.2   46.0
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.packed import KeptTwice

GROUP = 32
"""Columns that share a scale and an offset."""
MIDDLE = 8
"""The code whose value is the offset alone."""
_NUM_STEPS = 15
_OFF_GRID = 1e-4
"""How far a number may be from its grid value, as a share of a group's span. Numbers of a file
differ by float32's rounding; some of 32 arbitrary numbers differ by a quarter of a step."""
_ROWS_AT_ONCE = 1024
_FIRST_LOOK = 8
"""Rows that are tested first; they rule out most other matrices."""


@dataclass(frozen=True, slots=True)
class BlockMatrix(KeptTwice):
    """A weight as blocks."""

    offsets: Tensor
    """float32 [groups, out]"""

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, for rows that are rounded to 8 bits."""
        out_features, in_features = self.shape
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            x, self.packed, GROUP, in_features, out_features
        )
        product.addmm_(group_sums(x), self.offsets)
        return product if bias is None else product.add_(bias)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The parts of each number."""

    codes: Tensor
    """uint8 [out, in], 0 to 15"""
    scales: Tensor
    """float32 [out, groups]"""
    offsets: Tensor
    """float32 [out, groups]"""


def can_multiply_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has a fast form of the operator."""
    if device.type != "cpu" or dtype is not torch.float32 or platform.machine() != "aarch64":
        return False
    # Looked up by name: not every torch has them.
    kleidi = getattr(torch.backends, "kleidiai", None)
    operators = ("_dyn_quant_pack_4bit_weight", "_dyn_quant_matmul_4bit")
    has_operators = all(hasattr(torch.ops.aten, name) for name in operators)
    return kleidi is not None and bool(kleidi.is_available()) and has_operators


def pack_blocks(rows: Tensor) -> BlockMatrix | None:
    """Returns None if the numbers do not have this form."""
    blocks = find_blocks(rows)
    if blocks is None:
        return None
    out_features, in_features = rows.shape
    codes = blocks.codes[:, 1::2] << 4 | blocks.codes[:, ::2]
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
        codes, blocks.scales.to(torch.bfloat16), None, GROUP, in_features, out_features
    )
    return BlockMatrix(rows, packed, blocks.offsets.t().contiguous())


def find_blocks(rows: Tensor) -> Blocks | None:
    """The codes of numbers [out, in] that lie on 16 values in each group; None if some do not."""
    if rows.shape[1] % GROUP or _grid(rows[:_FIRST_LOOK]) is None:
        return None
    parts = [_grid(part) for part in torch.split(rows, _ROWS_AT_ONCE)]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    codes, scales, offsets = (
        torch.cat(columns)
        for columns in zip(*((b.codes, b.scales, b.offsets) for b in found), strict=True)
    )
    return Blocks(codes, scales, offsets)


def _grid(rows: Tensor) -> Blocks | None:
    groups = rows.float().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    span = high - low
    scales = torch.zeros_like(span)
    codes = torch.zeros(groups.shape, dtype=torch.uint8)
    left = torch.arange(len(groups))
    # Few groups have neither code 0 nor code 15, so few are tested twice.
    for num_steps in range(_NUM_STEPS, 0, -1):
        step = span[left] / num_steps
        above = groups[left] - low[left]
        places = torch.where(step > 0, above / step, torch.zeros_like(above)).round_()
        fits = ((places * step - above).abs() <= _OFF_GRID * span[left]).all(1)
        codes[left[fits]] = places[fits].to(torch.uint8)
        scales[left[fits]] = step[fits]
        left = left[~fits]
        if not len(left):
            break
    else:
        return None
    shape = (rows.shape[0], -1)
    offsets = low + MIDDLE * scales
    return Blocks(codes.view(shape), scales.view(shape), offsets.view(shape))


def group_sums(x: Tensor) -> Tensor:
    """Sums of each row's groups of columns: [rows, groups]."""
    return x.view(x.shape[0], -1, GROUP).sum(-1)
