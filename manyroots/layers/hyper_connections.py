"""The residual between the halves of a model's layers: one stream, or several that are mixed.

A half of a layer reads rows and gives a product; the residual hands out the one and takes in the
other. With one stream, the norm that reads it adds the product on the way (`layers/norm.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from manyroots.kernels.choice import Kernels
from manyroots.kernels.hyper.inputs import HyperRead, HyperWeights, ReadNorm
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.norm import NoNorm, RMSNorm
from manyroots.layers.spec import HyperSpec
from manyroots.layers.weights.fill import Fill, Fills


class HyperConnection:
    """How one half of a layer reads and writes streams, or, at the model's end, how they are
    joined."""

    def __init__(self, spec: HyperSpec, context: LayerContext, *, is_end: bool = False) -> None:
        count = spec.num_streams
        numbers = count if is_end else (2 + count) * count

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=context.device)

        self.data = HyperWeights(
            empty(numbers, count * context.hidden_size), empty(numbers), empty(1 if is_end else 3),
            context.eps, spec.eps, spec.num_iterations,
        )  # fmt: skip
        self._prefix = "hc_" if is_end else ""

    def weights(self, name: str) -> Fills:
        own = f"{name}.{self._prefix}"
        yield f"{own}fn", Fill(self.data.product)
        yield f"{own}base", Fill(self.data.base)
        yield f"{own}scale", Fill(self.data.scale)


class ResidualReader(Protocol):
    """The part of a sublayer that a residual stream needs."""

    reader: Linear | None
    norm: RMSNorm | NoNorm
    hyper: HyperConnection | None


class OneStream:
    """The usual residual."""

    def __init__(self, embedded: Tensor, kernels: Kernels) -> None:
        self._rows, self._kernels = embedded, kernels

    def read(self, half: ResidualReader, product: DeferredOutput | None) -> NormedRows:
        """What a half reads after the product of the half before."""
        if product is None:
            return half.norm.first(self._rows)
        return half.norm.after(self._rows, product, half.reader)

    def only(self, tokens: Tensor) -> None:
        """Go on with these tokens alone."""
        self._rows = self._rows[tokens]

    def end(self, norm: RMSNorm, product: DeferredOutput) -> Tensor:
        """Hidden states after the last norm."""
        return norm.rows_after(self._rows, product)


class ManyStreams:
    """The residual of a model with hyper-connections."""

    def __init__(self, embedded: Tensor, kernels: Kernels, end: HyperConnection) -> None:
        count = len(end.data.base)
        self._streams = embedded[:, None].expand(-1, count, -1).contiguous()
        self._kernels, self._end = kernels, end
        self._last: HyperRead | None = None

    def read(self, half: ResidualReader, product: DeferredOutput | None) -> NormedRows:
        assert half.hyper is not None, "all layers of such a model have them"
        self._write(product)
        norm = half.norm
        of_rows = ReadNorm(norm.weight, norm.eps) if isinstance(norm, RMSNorm) else None
        self._last = self._kernels.hyper.read_streams(self._streams, half.hyper.data, of_rows)
        return self._last.rows

    def only(self, tokens: Tensor) -> None:
        self._streams = self._streams[tokens]
        self._last = None if self._last is None else self._last.at(tokens)

    def end(self, norm: RMSNorm, product: DeferredOutput) -> Tensor:
        self._write(product)
        return norm.first(self._kernels.hyper.join_streams(self._streams, self._end.data))

    def _write(self, product: DeferredOutput | None) -> None:
        if product is None or self._last is None:
            return
        output, also = product.sums, product.also
        if product.lora is not None:
            output, also = product.finished(self._kernels), None
        self._streams = self._kernels.hyper.write_streams(self._streams, output, self._last, also)
