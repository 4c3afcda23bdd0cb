"""An adapter's weights in host memory: one low-rank pair per target, each with its own rank.

Plain tensors by target name, in the engine's dtype, all cut from one flat buffer (pinned where
there is a GPU), so that bringing an adapter to the device is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from manyroots.ids import AdapterDigest


@dataclass(frozen=True, slots=True)
class LoraPair:
    """delta(x) = scaling * B (A x)."""

    a: Tensor
    """Linear: [rank, in]. Embedding: [vocabulary, rank]. Experts: [experts or 1, rank, in]; 1 is
    shared by all."""
    b: Tensor
    """Linear and embedding: [out, rank]. Experts: [experts or 1, out, rank]."""
    scaling: float

    @property
    def rank(self) -> int:
        return int(self.b.shape[-1])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """Everything an adapter adds to the base model. A host copy is equal to itself alone."""

    digest: AdapterDigest
    pairs: Mapping[str, LoraPair]
    """By target name."""
    buffer: Tensor
    """Where all pairs lie, flat. As files are read: A of every pair, then B of every pair, in the
    order of the model's targets, so that the A of neighbours are one matrix."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()
