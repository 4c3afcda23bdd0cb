"""A product that the next operation completes, which is most often a norm.

One kernel may leave work to the next: partial sums of a product, an adapter's expand, the sum over
a token's experts, a norm of the output. Parts of a layer therefore pass on a `DeferredOutput`
instead of a plain tensor.
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
"""With more rows or a higher rank, a kernel with one program per row would read an adapter for each
row, which is too much. The adapter is then expanded by a separate kernel."""


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """The output of a mixer or a feed-forward block."""

    sums: Tensor
    """[num_tokens, n], or partial sums [splits, num_tokens, n]."""
    lora: LoraTerm | None = None
    """The adapters' addition, not yet expanded."""
    post: Tensor | None = None
    """The weight of a norm that is applied before the output is added to anything."""
    factor: float = 1.0
    """A factor that is applied before the output is added to anything."""
    also: Tensor | None = None
    """A second addend with the same adapters, factor and norm: [num_tokens, n], or partial sums."""

    def finished(self, kernels: Kernels) -> Tensor:
        """Partial sums added up and adapters expanded, [num_tokens, n]; not yet normalised."""
        is_in_parts = self.sums.dim() == 3 and self.sums.shape[0] > 1
        if is_in_parts and self.lora is not None and self.also is None:
            return kernels.lora_ops.complete(self.sums, self.lora)
        sums = _added_up(self.sums)
        if self.also is not None:
            sums = sums + _added_up(self.also)
        if self.lora is None:
            return sums
        whole = sums.to(self.lora.site.pool.dtype)
        kernels.lora_ops.expand(whole, self.lora)
        return whole

    def with_factor(self, factor: float) -> DeferredOutput:
        """Returns itself if the factor changes nothing, as in most models."""
        return self if factor == self.factor else replace(self, factor=factor)

    def rows(self, at: Tensor, kernels: Kernels) -> DeferredOutput:
        """The output of some tokens only."""
        return replace(self, sums=self.finished(kernels)[at], lora=None, also=None)

    def for_many(self, kernels: Kernels) -> DeferredOutput:
        """With its adapters' part added if it has many rows."""
        num_rows = self.sums.shape[-2]
        if self.lora is None:
            return self
        if num_rows <= MANY_ROWS and self.lora.site.max_rank <= MANY_RANKS:
            return self
        return replace(self, sums=self.finished(kernels), lora=None, also=None)

    def expanded(self, kernels: Kernels) -> Tensor:
        """[num_tokens, n], or partial sums [splits, num_tokens, n] where no adapter adds to it: for
        a kernel that adds them up."""
        assert self.also is None
        return self.sums if self.lora is None else self.finished(kernels)

    def over_ranks(self, shard: Shard, kernels: Kernels, dtype: torch.dtype) -> DeferredOutput:
        """The sum over ranks, each of which has a part of the inner dimension."""
        if shard.is_whole:
            return self
        whole = self.finished(kernels).to(dtype)
        return replace(self, sums=shard.add_up(whole), lora=None, also=None)


def _added_up(sums: Tensor) -> Tensor:
    if sums.dim() == 2:
        return sums
    return sums[0] if sums.shape[0] == 1 else sums.sum(0)


def sum_of(products: Sequence[DeferredOutput], kernels: Kernels) -> DeferredOutput:
    """The sum of several mixers' outputs for one input."""
    if len(products) == 1:
        return products[0]
    total = None
    for product in products:
        whole = product.finished(kernels)
        scaled = whole if product.factor == 1.0 else whole * product.factor
        total = scaled if total is None else total + scaled
    assert total is not None
    return DeferredOutput(total)
