"""Activations in FP8 for products with FP8 weights: the requested form, the rows, and a reference.

A product of many rows rounds each number to FP8. A product of few rows waits for its weight anyway,
so it takes two FP8 numbers: the rounded number, and the rounded remainder. Together they have eight
bits, like bfloat16. A scale covers a whole row, or the columns that the writing program holds at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.scaled import LARGEST, ScaledMatrix

LEAST_SCALE = 2.0**-100
"""The smallest scale; for rows that are zero or nearly zero."""
ROW_GROUP = 128
"""The fewest columns that share a scale."""
NUM_SCALES = 8
"""The scales that are tried for rows with one scale and one number: from the smallest up to its
double."""
NUM_TOPS, SHORTEST_RUN = 128, 8
"""At most this many of a row's columns count then: the largest of each run of neighbours."""


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """The form in which a product reads its rows."""

    num_parts: int
    """FP8 numbers per number; their sum represents it."""
    group: int | None
    """Columns that share a scale. None: a whole row or a multiple of ROW_GROUP, as suits the
    writing kernel."""
    keeps_values: bool = True
    """Whether adapters also need the original rows."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [num_rows, k], represented by the sum of their parts times a scale."""

    data: Tensor
    """float8_e4m3fn [num_parts, num_rows, k]"""
    scales: Tensor
    """float32 [num_rows, groups]"""
    group: int
    dtype: torch.dtype
    """The dtype of the original rows and of the results."""
    values: Tensor | None = None
    """The original rows, if an adapter reads them."""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape[1:]

    @property
    def rounded(self) -> ScaledMatrix:
        """The FP8 numbers of rows with one part."""
        assert len(self.data) == 1
        return ScaledMatrix(self.data[0], self.scales, self.group)

    def plain(self) -> Tensor:
        """The represented numbers, in float32."""
        return ScaledMatrix(self.data.float().sum(0), self.scales, self.group).plain(torch.float32)


def values_of(x: Tensor | Fp8Rows) -> Tensor:
    """The original rows, for adapters."""
    if isinstance(x, Tensor):
        return x
    assert x.values is not None, "these rows are for a product alone"
    return x.values


def tries_scales(num_parts: int, group: int, num_columns: int) -> bool:
    """Whether a row's scale is the best of several. A scale per group leaves less to gain, and a
    second number leaves nothing."""
    return num_parts == 1 and group >= num_columns


def run_length(num_columns: int) -> int:
    """Number of neighbouring columns of which only the largest counts when scales are tried."""
    run = SHORTEST_RUN
    while run * NUM_TOPS < num_columns:
        run *= 2
    return run


def in_fp8(x: Tensor, form: Fp8Form) -> Fp8Rows:
    """Takes rows [num_rows, k]. The scale is the smallest that holds a group's largest number, or a
    larger one that suits the row's large numbers best."""
    group = form.group or x.shape[1]
    pieces = torch.split(x.float(), group, dim=1)
    largest = [piece.abs().amax(1, keepdim=True) for piece in pieces]
    # Multiply with inverses on every device: division does not round alike everywhere.
    scales = [(most * (1.0 / LARGEST)).clamp(LEAST_SCALE) for most in largest]
    if tries_scales(form.num_parts, group, x.shape[1]):
        scales = [_best_scale(pieces[0], scales[0])]
    rest = torch.cat([p * s.reciprocal() for p, s in zip(pieces, scales, strict=True)], 1)
    data = []
    for _ in range(form.num_parts):
        data.append(rest.to(torch.float8_e4m3fn))
        rest = rest - data[-1].float()
    kept = x if form.keeps_values else None
    return Fp8Rows(torch.stack(data), torch.cat(scales, 1), group, x.dtype, kept)


def _best_scale(rows: Tensor, least: Tensor) -> Tensor:
    """The best of the tried scales, [num_rows, 1]: the least sum of squared errors, which large
    numbers dominate."""
    run = run_length(rows.shape[1])
    padded = torch.nn.functional.pad(rows.abs(), (0, -rows.shape[1] % run))
    tops = padded.view(len(rows), -1, run).amax(-1)
    step = torch.arange(NUM_SCALES, device=rows.device)
    factors = 1.0 + step * (1.0 / NUM_SCALES)
    scaled = tops[:, :, None] * (least.reciprocal() * factors.reciprocal())[:, None, :]
    # Rounded to three bits after the first.
    near = ((scaled.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)
    errors = (near - scaled).square().sum(1) * factors.square()
    is_lowest = errors == errors.amin(1, keepdim=True)
    first = torch.where(is_lowest, step, NUM_SCALES).amin(1, keepdim=True)
    return least * (1.0 + first * (1.0 / NUM_SCALES))
