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


def in_fp8(x: Tensor, form: Fp8Form) -> Fp8Rows:
    """Rows [num_rows, k]. The scale is the smallest that holds a group's largest number: they are
    rounded once and read once, so no other is tried."""
    group = form.group or x.shape[1]
    pieces = torch.split(x.float(), group, dim=1)
    largest = [piece.abs().amax(1, keepdim=True) for piece in pieces]
    # By products with inverses, on every device: quotients are not rounded alike everywhere.
    scales = [(most * (1.0 / LARGEST)).clamp(LEAST_SCALE) for most in largest]
    rest = torch.cat([p * s.reciprocal() for p, s in zip(pieces, scales, strict=True)], 1)
    data = []
    for _ in range(form.num_parts):
        data.append(rest.to(torch.float8_e4m3fn))
        rest = rest - data[-1].float()
    kept = x if form.keeps_values else None
    return Fp8Rows(torch.stack(data), torch.cat(scales, 1), group, x.dtype, kept)
