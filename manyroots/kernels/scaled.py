"""A matrix of small numbers with scales: what FP8 weights are to a kernel.

Every row has a scale for each `group` of its columns. A scale of a whole row is one group; that of
a tensor is the same for all rows; that of a block of rows and columns is said again for each of its
rows, so that kernels know one form. Which of these a checkpoint has is its loader's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
SIDE_STEP = 16
"""Inner dimensions are multiples of it on a GPU, so that rows are whole 16-byte loads."""
TILE_COLUMNS = 128
"""That a tile of FP8 has, which lies within a group."""
NUM_SCALES = 8
"""That are tried for a row."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """One, or a stack of them: [..., out, in]."""

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
    """[out, in] of INT8 with a scale for each row, multiplied with rows as they are."""

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
    """A matrix that is kept in another form than as plain numbers."""

    def plain(self, dtype: torch.dtype) -> Tensor: ...


def plain(matrix: Tensor | OfNumbers, dtype: torch.dtype) -> Tensor:
    """A matrix of any kind as plain numbers; a plain one stays as it is."""
    return matrix if isinstance(matrix, Tensor) else matrix.plain(dtype)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in FP8, and the scale of each row: [..., out, in] and [..., out, 1].

    Of the scales between the smallest that holds a row's largest number and its double, the one
    that leaves the least error: a tenth less of its square than the smallest, on normal numbers.
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
