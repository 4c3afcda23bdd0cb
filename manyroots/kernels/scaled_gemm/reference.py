"""Many rows times a weight in FP8, naive: rows are rounded to FP8 as well, each by its own largest
number, so that matrix instructions of FP8 can multiply the two."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.scaled import LARGEST, ScaledMatrix

LEAST_SCALE = 2.0**-100
"""Of rows that are zero, or nearly."""


def is_for(weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `linear` computes this."""
    return True


def round_rows(x: Tensor, group: int) -> ScaledMatrix:
    """Activations [rows, k] in FP8, with a scale for each `group` of a row's columns: the smallest
    that holds its largest number. They are rounded once and read once, so no other is tried."""
    pieces = torch.split(x.float(), group, dim=1)
    largest = [piece.abs().amax(1, keepdim=True) for piece in pieces]
    # By products with inverses, on every device: quotients are not rounded alike everywhere.
    scales = [(most * (1.0 / LARGEST)).clamp(LEAST_SCALE) for most in largest]
    data = [piece * scale.reciprocal() for piece, scale in zip(pieces, scales, strict=True)]
    return ScaledMatrix(torch.cat(data, 1).to(torch.float8_e4m3fn), torch.cat(scales, 1), group)


def linear(x: Tensor, weight: ScaledMatrix, bias: Tensor | None = None) -> Tensor:
    """x [rows, k] rounded, times weight [n, k] transposed, and a bias [n], in x's dtype."""
    rounded = round_rows(x, weight.group)
    out = rounded.plain(torch.float32) @ weight.plain(torch.float32).T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
