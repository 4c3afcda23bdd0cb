"""The gated feed-forward block: down(act(gate(x)) * up(x)). Gate and up are one product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import DenseSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart


class GatedMLP:
    """Takes [num_tokens, hidden_size], normalised."""

    def __init__(self, spec: DenseSpec, context: LayerContext) -> None:
        """`spec` is the rank's own."""
        self._spec, self._kernels = spec, context.kernels
        inner = spec.intermediate_size
        gate, up, self._down = spec.parts
        parts = {gate: 2 * inner} if spec.is_fused else {gate: inner, up: inner}
        if not spec.is_gated:
            parts = {up: inner}
        pieces = {gate: (OutputPiece(inner),) * 2} if spec.is_fused else None
        self.gate_up = Linear(
            context.hidden_size, parts, context, bias=spec.bias, side=Side.OUTPUT, pieces=pieces
        )
        self.down = Linear(
            inner, {"": context.hidden_size}, context, bias=spec.bias, side=Side.INPUT
        )

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        return self.gate_up

    def __call__(self, x: NormedRows, step: Step) -> DeferredOutput:
        most = self._kernels.gemm.ROWS_AT_ONCE
        if most is None or not isinstance(x, Tensor) or x.shape[0] <= most:
            return self._product(x, step)
        pieces = []
        for first in range(0, x.shape[0], most):
            rows = x[first : first + most]
            own = step
            if step.lora is not None:
                own = replace(step, lora=step.lora.between(first, first + len(rows)))
            pieces.append(self._product(rows, own).finished(self._kernels))
        return DeferredOutput(torch.cat(pieces), factor=self._spec.down_factor)

    def _product(self, x: NormedRows, step: Step) -> DeferredOutput:
        both = self.gate_up(x, step)
        if (
            self._spec.is_fused
        ):  # adapters also have both in one, which the activation cannot expand
            both = DeferredOutput(both.finished(self._kernels))
        elif not self._spec.is_gated:
            ups = both.finished(self._kernels)
            both = DeferredOutput(torch.cat((ups, ups), dim=-1))
        hidden = self._kernels.activation.gated(
            both.sums, self._spec.activation, self.down.weight.dtype, both.lora,
            self._spec.gate_factor, self.down.form(both.sums.shape[-2]),
        )  # fmt: skip
        return self.down(hidden, step).with_factor(self._spec.down_factor)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the block `name`."""
        yield from self.gate_up.weights(name)
        yield from self.down.weights(f"{name}.{self._down}")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the block `name` that adapters may change."""
        yield from self.gate_up.lora_parts(name)
        yield from self.down.lora_parts(f"{name}.{self._down}")

    def products(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)
