"""Root-mean-square normalisation over the last dimension.

Takes activations of any shape; gives the same shape. Sums in float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps), scaled per channel."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensor for the norm `name` goes."""
        yield f"{name}.weight", self.weight
