"""Activations whose norm leaves the division to the next product.

To divide a row by its root mean square, one program must have seen all of it. If many programs
share a row, each stores the sum of its squares instead, and the product that reads the row divides
its own result. The function is the same, and no program waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Rows


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """Rows that are scaled by the norm's weight but not yet divided."""

    values: Tensor
    """[num_rows, n] in the model's dtype."""
    squares: Tensor
    """float32 [num_rows, num_pieces]: sums of the squares of the normalised values."""
    eps: float
    in_fp8: Fp8Rows | None = None
    """The same values, for a product with a weight in FP8."""

    @property
    def factors(self) -> Tensor:
        """The remaining factor of each row, float32 [num_rows, 1]."""
        mean = self.squares.sum(1, keepdim=True) / self.values.shape[1]
        return torch.rsqrt(mean + self.eps)


NormedRows = Tensor | Fp8Rows | DeferredRMSNorm
"""A norm's output for the one product that reads it."""


def whole_rows(x: NormedRows) -> Tensor:
    """The rows for any reader: divided and unrounded."""
    if not isinstance(x, Tensor):
        raise TypeError("this reader takes rows that are whole")
    return x
