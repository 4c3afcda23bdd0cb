"""One adapter's weights as torch's operators read them: views of a transposed pool, by site.

An adapter may change several projections that the model computes as one product (queries, keys
and values, say). Their first halves lie together, so that they are one product here, too:

    h  = x A^T                      [tokens, sum of ranks]
    y[:, columns] += h[:, ranks] B  for each part

Every rank is the adapter's own. `scaling` is inside `b` already. A *site* is any hashable that
stands for one product of one model; kernels only look it up.
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
    """What one adapter adds to one product."""

    a: Tensor
    """[sum of ranks, in]; embedding: [vocabulary, rank]; experts: [experts, or 1 for all, sum of
    ranks, in]."""
    parts: tuple[Part, ...]
    out_features: int
    """Of the whole product, with the parts that this adapter leaves alone."""

    @property
    def rank(self) -> int:
        """Columns of h."""
        return int(self.parts[-1].ranks.stop)


@dataclass(frozen=True, slots=True, eq=False)
class SlotWeights:
    """One adapter on the device. Two loadings of the same adapter are different objects."""

    linears: Mapping[Site, LowRank]
    lookups: Mapping[Site, LowRank]
    """Embeddings."""
    experts: Mapping[Site, tuple[LowRank, ...]]
    """Two where of the projections of a product one shares its first half among experts and the
    other does not."""
    rank: int
    """The highest of its sites."""
    buffer: Tensor
    """Flat: all of the above are cut from it."""

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()
