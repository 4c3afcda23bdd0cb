"""What all layers of one model are made with.

Made once by the decoder. A layer takes from it what it needs and hands it on to its products, so
that a new property of weights or devices changes no layer's constructor.
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
    """One rank's model, as its layers see it."""

    hidden_size: int
    eps: float
    """Of the norms."""
    norm_offset: float = 0.0
    """What a checkpoint's norm weights are less."""
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    shard: Shard = WHOLE
    format: WeightFormat = PLAIN
    """How weights of products are kept."""

    def empty(self, *shape: int) -> Tensor:
        """Numbers in the model's dtype, to be filled from a checkpoint."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def unquantized(self) -> LayerContext:
        """For products whose few numbers decide much: routers, gates and heads."""
        kept = self.format.unquantized
        return self if kept is self.format else replace(self, format=kept)
