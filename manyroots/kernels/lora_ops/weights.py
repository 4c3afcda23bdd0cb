"""One adapter's weights for torch's operators: views of a transposed pool, by site.

An adapter may change several projections that the model computes as one product, such as queries,
keys and values. Their A matrices are adjacent, so they are one product here, too:

    h  = x A^T                      [tokens, sum of ranks]
    y[:, columns] += h[:, ranks] B  for each part

Every rank is the adapter's own. `b` already includes `scaling`. A *site* is any hashable that
identifies one product of one model; kernels only look it up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

Site = Hashable


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a product."""

    ranks: slice
    """Its columns of h."""
    columns: slice
    """Its columns of y."""
    b: Tensor
    """[rank, out], scaled; experts: [experts, or 1 for all, rank, out]."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's addition to one product."""

    a: Tensor
    """[sum of ranks, in]; embedding: [vocabulary, rank]; experts: [experts, or 1 for all, sum of
    ranks, in]."""
    parts: tuple[Part, ...]
    out_features: int
    """Width of the whole product, including parts that this adapter does not change."""

    @property
    def rank(self) -> int:
        """Columns of h."""
        return int(self.parts[-1].ranks.stop)


@dataclass(frozen=True, slots=True, eq=False)
class SlotWeights:
    """One adapter on the device. Loading the same adapter twice gives different objects."""

    linears: Mapping[Site, LowRank]
    lookups: Mapping[Site, LowRank]
    """Embeddings."""
    experts: Mapping[Site, tuple[LowRank, ...]]
    """Two if one projection of a product shares its A among experts and another does not."""
    rank: int
    """The highest rank of its sites."""
    buffer: Tensor
    """Flat memory; everything above is a view of it."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()
