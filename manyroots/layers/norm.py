"""Root-mean-square normalisation, of rows or of the residual stream after a product."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE, Shard
from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.weights.fill import Fill, Fills


class NoNorm:
    """Replaces an `RMSNorm` in layers that read the residual stream without a norm."""

    def __init__(self, context: LayerContext) -> None:
        # The kernel that adds also normalises; the normalised values are not used here.
        self._unread = torch.ones(context.hidden_size, dtype=context.dtype, device=context.device)
        self._eps, self._kernels = context.eps, context.kernels

    def first(self, x: Tensor) -> Tensor:
        return x

    def after(
        self, residual: Tensor, product: DeferredOutput, reader: Linear | None = None
    ) -> NormedRows:
        """Add a product to the residual in place; returns the sum."""
        product = product.for_many(self._kernels)
        self._kernels.norm.add_rms_norm(
            residual, product.sums, self._unread, self._eps, product.lora, product.post,
            product.factor, None, product.also,
        )  # fmt: skip
        return residual

    def weights(self, name: str) -> Fills:
        """None."""
        yield from ()


class RMSNorm:
    """x / sqrt(mean(x^2) + eps), scaled per channel."""

    def __init__(self, size: int, context: LayerContext) -> None:
        """If a checkpoint stores weights minus one, 1 + w is stored in float32: half precision
        cannot hold both."""
        kept = torch.float32 if context.norm_offset else context.dtype
        self.weight = torch.empty(size, dtype=kept, device=context.device)
        self.eps, self._offset, self._kernels = context.eps, context.norm_offset, context.kernels

    def first(self, x: Tensor) -> Tensor:
        """Normalise the residual stream before the first layer."""
        return self._kernels.norm.rms_norm(x, self.weight, self.eps)

    def after(
        self, residual: Tensor, product: DeferredOutput, reader: Linear | None = None
    ) -> NormedRows:
        """Add a product to the residual in place; returns the sum, normalised.

        `reader`: the product that reads the result, if there is only one. It gets rows in the form
        that it reads. The adapters' part is then spread over many programs if that is faster, and
        the reader divides.
        """
        norm = self._kernels.norm
        form = None if reader is None else reader.form(residual.shape[0])
        if (
            product.lora is not None
            and product.post is None
            and product.factor == 1.0
            and reader is not None
            and reader.takes_deferred_norm(residual.shape[0])
            and residual.dtype != torch.float16  # undivided rows might exceed its range
        ):
            return norm.add_norm(
                residual, product.sums, self.weight, self.eps, product.lora, form, product.also
            )
        return self._normed(residual, product, form)

    def rows_after(self, residual: Tensor, product: DeferredOutput) -> Tensor:
        """The same for any reader."""
        rows = self._normed(residual, product, None)
        assert isinstance(rows, Tensor)
        return rows

    def _normed(
        self, residual: Tensor, product: DeferredOutput, form: Fp8Form | None
    ) -> Tensor | Fp8Rows:
        product = product.for_many(self._kernels)
        return self._kernels.norm.add_rms_norm(
            residual, product.sums, self.weight, self.eps, product.lora, product.post,
            product.factor, form, product.also,
        )  # fmt: skip

    def weights(self, name: str, shard: Shard = WHOLE) -> Fills:
        """Destination of a checkpoint's tensor for the norm `name`. `shard`: set if each rank has a
        part of it."""
        yield f"{name}.weight", Fill(self.weight, 0, shard, offset=self._offset)
