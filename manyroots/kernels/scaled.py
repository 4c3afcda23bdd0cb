"""A matrix of small numbers with scales: the form of FP8 weights for kernels.

Every row has a scale for each `group` of its columns, so kernels know one form. A scale of a whole
row is one group. A scale of a tensor is repeated for all rows, and that of a block of rows and
columns for each of its rows. The loader handles the forms of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
MANTISSA_BITS = 3
SMALLEST_POWER = float(torch.finfo(torch.float8_e4m3fn).smallest_normal)
_EXPONENT = 0x7F800000
"""The bits of a float32 that hold its power of two."""
SIDE_STEP = 16
"""Inner dimensions are multiples of this on a GPU, so that rows are whole 16-byte loads."""
TILE_COLUMNS = 128
"""Columns of an FP8 tile, which lies within a group."""
NUM_SCALES = 8
"""Scales that are tried for a row."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """One matrix, or a stack of them: [..., out, in]."""

    data: Tensor
    """float8_e4m3fn [..., out, in]"""
    scales: Tensor
    """float32 [..., out, groups]"""
    group: int
    """Columns that share a scale; the last group of a row may have fewer."""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def itemsize(self) -> int:
        return self.data.itemsize

    @property
    def has_row_scales(self) -> bool:
        return self.scales.shape[-1] == 1

    def __getitem__(self, index: int) -> ScaledMatrix:
        return ScaledMatrix(self.data[index], self.scales[index], self.group)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers themselves."""
        scales = self.scales
        if not self.has_row_scales:
            scales = scales.repeat_interleave(self.group, -1)[..., : self.shape[-1]]
        return (self.data.float() * scales).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """[out, in] of INT8 with a scale for each row, multiplied with unrounded rows."""

    data: Tensor
    """int8 [out, in]"""
    scales: Tensor
    """float32 [out, 1]"""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def itemsize(self) -> int:
        return self.data.itemsize

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers themselves."""
        return (self.data.float() * self.scales).to(dtype)


Matrix = Tensor | ScaledMatrix | Int8Matrix


class OfNumbers(Protocol):
    """A matrix that is stored in another form than plain numbers."""

    def plain(self, dtype: torch.dtype) -> Tensor: ...


def plain(matrix: Tensor | OfNumbers, dtype: torch.dtype) -> Tensor:
    """A matrix of any kind as plain numbers; a plain one is returned unchanged."""
    return matrix if isinstance(matrix, Tensor) else matrix.plain(dtype)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in FP8, and the scale of each row: [..., out, in] and [..., out, 1].

    The scales that are tried lie between the smallest that holds a row's largest number and its
    double. The one with the least error wins: on normal numbers its squared error is a tenth less
    than that of the smallest.
    """
    rows = rows.float()
    least = rows.abs().amax(-1, keepdim=True) / LARGEST
    # A row of zeros has a scale, too.
    least = torch.where(least > 0, least, torch.ones_like(least))
    scales, lowest = least, _error(rows, least)
    for step in range(1, NUM_SCALES):
        scale = least * 2 ** (step / NUM_SCALES)
        error = _error(rows, scale)
        scales, lowest = torch.where(error < lowest, scale, scales), torch.minimum(error, lowest)
    return _rounded(rows, scales), scales


def quantize_rows_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in INT8, and the scale of each row: [out, in] and [out, 1]."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (rows / scales).round().to(torch.int8), scales


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _error(rows: Tensor, scales: Tensor) -> Tensor:
    nearest = _nearest((rows / scales).clamp_(-LARGEST, LARGEST))
    return nearest.mul_(scales).sub_(rows).square_().sum(-1, keepdim=True)


def _nearest(numbers: Tensor) -> Tensor:
    """float32: the numbers of E4M3 nearest to these. On a CPU it takes half as long as a conversion
    to E4M3 and back."""
    powers = (numbers.view(torch.int32) & _EXPONENT).view(torch.float32)
    distances = powers.clamp_(min=SMALLEST_POWER).mul_(2.0**-MANTISSA_BITS)
    return (numbers / distances).round_().mul_(distances)
