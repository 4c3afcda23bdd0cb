"""Reference of many rows times a weight in FP8. Each row is rounded to FP8 by its own largest
number, so that FP8 matrix instructions can multiply the two."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, in_fp8
from manyroots.kernels.scaled import ScaledMatrix


def is_for(weight: ScaledMatrix, dtype: torch.dtype) -> bool:
    """Whether `linear` supports this product."""
    return True


def form_for(weight: ScaledMatrix, keeps_values: bool) -> Fp8Form | None:
    """The form in which `linear` reads rows; it rounds plain rows itself."""
    return Fp8Form(1, weight.group, keeps_values)


def linear(x: Tensor | Fp8Rows, weight: ScaledMatrix, bias: Tensor | None = None) -> Tensor:
    """x [rows, k] rounded, times weight [n, k] transposed, and a bias [n], in x's dtype."""
    rows = in_fp8(x, Fp8Form(1, weight.group)) if isinstance(x, Tensor) else x
    out = rows.plain() @ weight.plain(torch.float32).T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
