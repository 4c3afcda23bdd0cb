"""Inputs of the kernel between the qkv product and attention, apart from that product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.scaled import LARGEST


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the dtype of pages. FP8 has no infinity: numbers beyond its range become
    its largest, and NaN stays NaN."""
    if dtype is torch.float8_e4m3fn:
        x = x.clamp(-LARGEST, LARGEST)
    return x.to(dtype)


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Per-head normalisation of queries and keys; None if the model has none."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The rotation of one step's tokens, computed once for all layers."""

    cos: Tensor
    """float32 [num_tokens, pairs]: for the first 2 * pairs dimensions of a head, which are rotated.
    Most models rotate all dimensions, some none."""
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> RopeTable:
        """For tokens at `positions`, with float32 `frequencies` [pairs]."""
        angles = positions[:, None].float() * frequencies
        return cls(torch.cos(angles) * scaling, torch.sin(angles) * scaling)

    def rows(self, positions: Tensor) -> RopeTable:
        """The entries of a step's tokens from a table of all positions."""
        return RopeTable(self.cos[positions], self.sin[positions])


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Destination of each token's keys and values."""

    pages: Tensor
    """int32 or int64 [num_tokens]; negative for a padding row, which is not written."""
    offsets: Tensor
    """The same for the offset within the page."""
    new_pages: Tensor | None = None
    """int64: pages whose first token this step writes, and that must be cleared first. None for
    kernels that read exactly the tokens that a query sees."""
    tokens: Tensor | None = None
    """int64: the tokens of these slots, if tokens without a slot were left out."""
