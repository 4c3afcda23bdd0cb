"""Activations of which a norm left the last step to whoever reads them.

To divide a row by its root mean square, one program must have seen all of it. Where many programs
share a row, each leaves the sum of its squares instead, and the product that reads the row divides
its own result: the same function, and no program waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Rows


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """Rows that are scaled by the norm's weight and not yet divided."""

    values: Tensor
    """[num_rows, n] in the model's dtype."""
    squares: Tensor
    """float32 [num_rows, num_pieces]: sums of the squares of what was normalised."""
    eps: float
    in_fp8: Fp8Rows | None = None
    """The same values, for a product with a weight in FP8."""

    @property
    def factors(self) -> Tensor:
        """What each row is still to be multiplied with, float32 [num_rows, 1]."""
        mean = self.squares.sum(1, keepdim=True) / self.values.shape[1]
        return torch.rsqrt(mean + self.eps)


NormedRows = Tensor | Fp8Rows | DeferredRMSNorm
"""What a norm gives to the one product that reads it."""


def whole_rows(x: NormedRows) -> Tensor:
    """For readers of any kind, to whom rows come divided and as they are."""
    if not isinstance(x, Tensor):
        raise TypeError("this reader takes rows that are whole")
    return x
