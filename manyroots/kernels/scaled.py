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
    best = _rounded(rows, least)
    scales, lowest = least, _error(rows, best, least)
    for step in range(1, NUM_SCALES):
        scale = least * 2 ** (step / NUM_SCALES)
        data = _rounded(rows, scale)
        error = _error(rows, data, scale)
        is_better = error < lowest
        best = torch.where(is_better, data.view(torch.uint8), best.view(torch.uint8))
        best = best.view(torch.float8_e4m3fn)
        scales, lowest = torch.where(is_better, scale, scales), torch.minimum(error, lowest)
    return best, scales


def quantize_rows_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in INT8, and the scale of each row: [out, in] and [out, 1]."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (rows / scales).round().to(torch.int8), scales


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _error(rows: Tensor, data: Tensor, scales: Tensor) -> Tensor:
    return (data.float() * scales - rows).square().sum(-1, keepdim=True)
