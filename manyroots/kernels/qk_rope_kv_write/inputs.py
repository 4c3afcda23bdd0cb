"""What the kernel between the qkv product and attention is given, besides that product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.scaled import LARGEST


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as pages of this dtype have them. FP8 has no infinity: what is larger than its
    largest number becomes that, and what is no number stays none."""
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Per-head normalisation of queries and keys; None where the model has none."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The rotation of one step's tokens, worked out once for all layers."""

    cos: Tensor
    """float32 [num_tokens, pairs]: of a head's first 2 * pairs dimensions, which are rotated; all
    of them in most models, none in some."""
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> RopeTable:
        """For tokens at `positions`, with float32 `frequencies` [pairs]."""
        angles = positions[:, None].float() * frequencies
        return cls(torch.cos(angles) * scaling, torch.sin(angles) * scaling)

    def rows(self, positions: Tensor) -> RopeTable:
        """Those of a step's tokens, of a table that has every position."""
        return RopeTable(self.cos[positions], self.sin[positions])


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where each token's keys and values go."""

    pages: Tensor
    """int32 or int64 [num_tokens]; negative: nowhere (a row that only pads the batch)."""
    offsets: Tensor
    """The same: the place within the page."""
    new_pages: Tensor | None = None
    """int64: pages whose first token this step writes, and that must be cleared before; None for
    kernels that read exactly the tokens a query sees."""
    tokens: Tensor | None = None
    """int64: the tokens that the places are of, where those that go nowhere were left out."""
