"""What the kernels of hyper-connections are given and give."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """The weights of one half of a layer, or of the model's end, in float32. With n streams a half
    has n numbers to read them by, n to write to them and n * n to mix them; the end has the first n
    alone."""

    product: Tensor
    """[numbers, n * hidden]"""
    base: Tensor
    """[numbers]"""
    scale: Tensor
    """[3], or [1] of the end."""
    norm_eps: float
    eps: float
    num_iterations: int


@dataclass(frozen=True, slots=True)
class ReadNorm:
    """The norm of the rows that a half of a layer reads."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HyperRead:
    """What a half of a layer reads, and how its output is written."""

    rows: Tensor
    """[tokens, hidden], normalised if the half has a norm."""
    post: Tensor
    """[tokens, n]: how much of the output each stream is given."""
    mix: Tensor
    """[tokens, n, n]: how much of stream i is in stream j afterwards."""

    def at(self, tokens: Tensor) -> HyperRead:
        """Of some tokens alone."""
        return HyperRead(self.rows[tokens], self.post[tokens], self.mix[tokens])
