"""Shared parameters of all layers of one model.

Made once by the decoder. A layer takes what it needs and passes the context to its products, so a
new property of weights or devices changes no layer's constructor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.kernels.choice import Kernels
from manyroots.layers.weights.formats import PLAIN, WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """One rank's model, from the point of view of its layers."""

    hidden_size: int
    eps: float
    """Epsilon of the norms."""
    norm_offset: float = 0.0
    """Number that is added to a checkpoint's norm weights."""
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    shard: Shard = WHOLE
    format: WeightFormat = PLAIN
    """The format of products' weights."""

    def empty(self, *shape: int) -> Tensor:
        """A tensor in the model's dtype, to be filled from a checkpoint."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def unquantized(self) -> LayerContext:
        """For products whose few numbers matter much: routers, gates and heads."""
        kept = self.format.unquantized
        return self if kept is self.format else replace(self, format=kept)
