"""A product that its reader finishes, and the norm that most often is that reader.

What one kernel leaves undone (partial sums of a product, an adapter's second half, the sum over a
token's experts, a norm of its own) the next one takes in on the way. So pieces of a layer hand on
a `DeferredOutput` instead of a plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyroots.distributed.shard import Shard
from manyroots.kernels.choice import Kernels
from manyroots.kernels.lora_ops.sites import LoraTerm

MANY_ROWS, MANY_RANKS = 128, 16
"""Beyond so many rows, or so high a rank, a reader with one program per row would read too much, an
adapter for each row; it is expanded on its own instead."""


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """What a mixer or a feed-forward block gives."""

    sums: Tensor
    """[num_tokens, n], or partial sums [splits, num_tokens, n]."""
    lora: LoraTerm | None = None
    """What adapters add, not yet expanded."""
    post: Tensor | None = None
    """The weight of a norm that is applied before it is added to anything."""
    factor: float = 1.0
    """What it is multiplied with before it is added to anything."""

    def finished(self, kernels: Kernels) -> Tensor:
        """Partial sums added up and adapters expanded, [num_tokens, n]; not yet normalised."""
        sums = self.sums
        if sums.dim() == 3:
            sums = sums[0] if sums.shape[0] == 1 else sums.sum(0)
        if self.lora is None:
            return sums
        whole = sums.to(self.lora.site.pool.dtype)
        kernels.lora_ops.expand(whole, self.lora)
        return whole

    def with_factor(self, factor: float) -> DeferredOutput:
        """Itself where that changes nothing, as in most models: it is a part of every step."""
        return self if factor == self.factor else replace(self, factor=factor)

    def rows(self, at: Tensor, kernels: Kernels) -> DeferredOutput:
        """Of some tokens alone."""
        return replace(self, sums=self.finished(kernels)[at], lora=None)

    def for_many(self, kernels: Kernels) -> DeferredOutput:
        """With its adapters' part if it has many rows."""
        num_rows = self.sums.shape[-2]
        if self.lora is None:
            return self
        if num_rows <= MANY_ROWS and self.lora.site.max_rank <= MANY_RANKS:
            return self
        return replace(self, sums=self.finished(kernels), lora=None)

    def over_ranks(self, shard: Shard, kernels: Kernels, dtype: torch.dtype) -> DeferredOutput:
        """The sum over ranks that each have a part of the inner dimension."""
        if shard.is_whole:
            return self
        whole = self.finished(kernels).to(dtype)
        return replace(self, sums=shard.add_up(whole), lora=None)


def sum_of(products: Sequence[DeferredOutput], kernels: Kernels) -> DeferredOutput:
    """Of what several mixers give of one input."""
    if len(products) == 1:
        return products[0]
    total = None
    for product in products:
        whole = product.finished(kernels)
        scaled = whole if product.factor == 1.0 else whole * product.factor
        total = scaled if total is None else total + scaled
    assert total is not None
    return DeferredOutput(total)
