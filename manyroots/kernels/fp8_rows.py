"""Activations in FP8, for products with FP8 weights: what a reader wants, what it gets, and how it
is computed, naively.

A product of many rows takes each number as the one of FP8 next to it. One of few rows waits for its
weight anyway, so it takes two: the number next to it, and the one next to what is left. Together
these have eight bits, as bfloat16 has. Columns that share a scale are a whole row, or as many of it
as the program has at once that rows come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.scaled import LARGEST, ScaledMatrix

LEAST_SCALE = 2.0**-100
"""Of rows that are zero, or nearly."""
ROW_GROUP = 128
"""The fewest columns that share a scale."""
NUM_SCALES = 8
"""That are tried for rows with one scale and one number: from the smallest up to its double."""
NUM_TOPS, SHORTEST_RUN = 128, 8
"""Of a row's columns at most so many count there: the largest of each run of neighbours."""


@dataclass(frozen=True, slots=True)
class Fp8Form:
    """How a product wants its rows."""

    num_parts: int
    """Numbers of FP8 that each number becomes; their sum stands for it."""
    group: int | None
    """Columns that share a scale; None: all of a row or a multiple of ROW_GROUP, as suits who
    writes them."""
    keeps_values: bool = True
    """Whether rows are wanted as they were, too: by adapters."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows [num_rows, k] that stand for the sum of their parts times a scale."""

    data: Tensor
    """float8_e4m3fn [num_parts, num_rows, k]"""
    scales: Tensor
    """float32 [num_rows, groups]"""
    group: int
    dtype: torch.dtype
    """Of what they were made of, and of what is computed with them."""
    values: Tensor | None = None
    """What they were made of, where somebody reads it."""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape[1:]

    @property
    def rounded(self) -> ScaledMatrix:
        """Of rows in one part."""
        assert len(self.data) == 1
        return ScaledMatrix(self.data[0], self.scales, self.group)

    def plain(self) -> Tensor:
        """The numbers that they stand for, in float32."""
        return ScaledMatrix(self.data.float().sum(0), self.scales, self.group).plain(torch.float32)


def values_of(x: Tensor | Fp8Rows) -> Tensor:
    """Rows as they were, for adapters."""
    if isinstance(x, Tensor):
        return x
    assert x.values is not None, "these rows are for a product alone"
    return x.values


def tries_scales(num_parts: int, group: int, num_columns: int) -> bool:
    """Whether a row's scale is the best of several. One of a group leaves less to gain, and beside
    a second number there is nothing."""
    return num_parts == 1 and group >= num_columns


def run_length(num_columns: int) -> int:
    """Neighbouring columns, of which their largest number alone counts where scales are tried."""
    run = SHORTEST_RUN
    while run * NUM_TOPS < num_columns:
        run *= 2
    return run


def in_fp8(x: Tensor, form: Fp8Form) -> Fp8Rows:
    """Rows [num_rows, k]. The scale is the smallest that holds a group's largest number, or of some
    that are larger the one that suits the row's large numbers best."""
    group = form.group or x.shape[1]
    pieces = torch.split(x.float(), group, dim=1)
    largest = [piece.abs().amax(1, keepdim=True) for piece in pieces]
    # By products with inverses, on every device: quotients are not rounded alike everywhere.
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
    """Of those tried, [num_rows, 1]: that with the least sum of squared errors, most of which large
    numbers have."""
    run = run_length(rows.shape[1])
    padded = torch.nn.functional.pad(rows.abs(), (0, -rows.shape[1] % run))
    tops = padded.view(len(rows), -1, run).amax(-1)
    step = torch.arange(NUM_SCALES, device=rows.device)
    factors = 1.0 + step * (1.0 / NUM_SCALES)
    scaled = tops[:, :, None] * (least.reciprocal() * factors.reciprocal())[:, None, :]
    # To three bits behind the first.
    near = ((scaled.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)
    errors = (near - scaled).square().sum(1) * factors.square()
    is_lowest = errors == errors.amin(1, keepdim=True)
    first = torch.where(is_lowest, step, NUM_SCALES).amin(1, keepdim=True)
    return least * (1.0 + first * (1.0 / NUM_SCALES))
