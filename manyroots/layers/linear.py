"""Products with weights; no other module multiplies by a weight.

Takes activations [num_tokens, in]; gives a `DeferredOutput` of [num_tokens, out]. Several
projections of one input share one weight and are one product; the loader still sees each as a
separate destination. Adapters attach here: a product is one site, and `lora_parts` names its parts.
Knows nothing of what the weights mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from manyroots.kernels.fp8_rows import Fp8Form, values_of
from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows
from manyroots.kernels.norm.deferred import DeferredRMSNorm, NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.layers.weights.weight import Weight
from manyroots.lora.targets import OutputPiece, Side, TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart


class Linear:
    """y = x W^T + b, plus the adapters' part."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        context: LayerContext,
        *,
        bias: bool,
        side: Side | None,
        pieces: Mapping[str, tuple[OutputPiece, ...]] | None = None,
    ) -> None:
        """`parts`: this rank's width of each projection, by name; "" for a single one. `side`: the
        side that ranks divide. `pieces`: by projection name, the pieces of its output, if ranks
        divide it piece by piece."""
        self._context, self._format = context, context.format
        self._shape = sum(parts.values()), in_features
        self._keeps_numbers = False
        self.bias = context.empty(self._shape[0]) if bias else None
        self.site = LoraSite(TargetKind.LINEAR, in_features, parts, pieces=pieces, side=side)
        self.pooled: LinearSite | None = None
        """The offsets of adapters' weights for it; None in a model without adapters."""
        ends = list(accumulate(parts.values()))
        self._rows = {
            name: slice(end - size, end)
            for (name, size), end in zip(parts.items(), ends, strict=True)
        }
        self._side, self._shard, self._pieces = side, context.shard, dict(pieces or {})
        self._kernels = context.kernels

    @cached_property
    def weight(self) -> Weight:
        """Made when it is first used: a checkpoint's names for it determine its format."""
        context = self._context
        data = self._format.matrix(*self._shape, context.dtype, context.device)
        return Weight(data, context.dtype, self._format, keeps_numbers=self._keeps_numbers)

    def keep_numbers(self) -> None:
        """For a layer that multiplies parts of its weight; call before the weight is made."""
        self._keeps_numbers = True

    def __call__(self, x: NormedRows, step: Step) -> DeferredOutput:
        return self.of(x, step.lora)

    def of(self, x: NormedRows, lora: LoraRows | None) -> DeferredOutput:
        """The product of rows with these adapters; rows need not be the step's tokens."""
        rows = None if self.pooled is None else lora
        kernels, weight = self._kernels, self.weight
        if isinstance(x, DeferredRMSNorm) or self._is_own(
            x.shape[0], has_adapters=rows is not None
        ):
            return DeferredOutput(
                *kernels.gemm.linear(x, weight.operand, self.pooled, rows, self.bias)
            )
        sums = weight.format.times(x, weight.data, self.bias, kernels)
        if self.pooled is None or rows is None:
            return DeferredOutput(sums)
        return DeferredOutput(sums, kernels.lora_ops.shrink(values_of(x), self.pooled, rows))

    def takes_deferred_norm(self, num_rows: int) -> bool:
        """Whether it can read undivided rows of a norm, some of them with adapters."""
        return self._is_own(num_rows, has_adapters=self.pooled is not None)

    def form(self, num_rows: int) -> Fp8Form | None:
        """The form in which it reads this many rows, if not unchanged."""
        weight, keeps = self.weight, self.pooled is not None
        return weight.format.row_form(
            weight.operand, num_rows, weight.dtype, self._kernels, keeps_values=keeps
        )

    def _is_own(self, num_rows: int, *, has_adapters: bool) -> bool:
        """Whether the kernel set computes this product; otherwise the library does."""
        return self._kernels.gemm.is_for(num_rows, self.weight.operand, has_adapters=has_adapters)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the projection `name`, or for those in the
        folder `name`."""
        names = {part: f"{name}.{part}" if part else name for part in self._rows}
        self._format = self._context.format.of(names.values())
        for part, rows in self._rows.items():
            own = names[part]
            pieces = self._pieces.get(part, ())
            for tensor, fill in self.weight.fills(own, rows, self._side, self._shard):
                yield tensor, replace(fill, pieces=pieces)
            if self.bias is None:
                continue
            if self._side is Side.INPUT:
                yield f"{own}.bias", Fill(self.bias[rows], shard=self._shard, is_first_only=True)
            else:
                cut = 0 if self._side is Side.OUTPUT else None
                yield f"{own}.bias", Fill(self.bias[rows], cut, self._shard, pieces=pieces)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of it that adapters may change."""
        yield from self.site.targets(name)
