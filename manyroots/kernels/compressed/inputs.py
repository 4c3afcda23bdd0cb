"""What the kernels of compressed groups are given, besides tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyroots.kernels.compressed.step import RowsStep


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One vector of a group's entry: the softmax-weighted mean of its tokens' vectors, normalised.

    A token's row has its vectors from `first` on, then as many weights before the softmax. With two
    series, the tokens of the group before give the first and the group's own tokens the second."""

    first: int
    dim: int
    bias: Tensor
    """float32 [size, series * dim]: added to the weights by a token's place in its group."""
    norm: Tensor
    """[dim]"""
    eps: float

    @property
    def num_series(self) -> int:
        return self.bias.shape[1] // self.dim


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of a token's row; queries have the same without a weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Rows that queries attend to."""

    pages: Tensor
    """[num_pages, rows of a page, width]"""
    step: RowsStep
    window: int | None
    """Tokens that a query sees at most, itself included; None: all."""
