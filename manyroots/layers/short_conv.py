"""A gated short convolution with its projections: combines each token with the few before it.

    B, C, x = in_proj(input)
    out_proj(C * conv(B * x))

It remembers the last `width - 1` of B * x. There are no heads: ranks divide channels.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import ShortConvSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart


class ShortConv:
    """in_proj, a causal convolution between two gates, and out_proj."""

    def __init__(self, spec: ShortConvSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._family, self._kernels, self._shard = family, context.kernels, context.shard
        channels = spec.channels
        self.in_proj = Linear(
            context.hidden_size,
            {"": 3 * channels},
            context,
            bias=spec.bias,
            side=Side.OUTPUT,
            pieces={"": (OutputPiece(channels),) * 3},
        )
        self.out_proj = Linear(
            channels, {"": context.hidden_size}, context, bias=spec.bias, side=Side.INPUT
        )
        self._weight = context.empty(channels, spec.width)
        self._bias = context.empty(channels) if spec.bias else None

    @property
    def reader(self) -> Linear | None:
        return self.in_proj

    def __call__(self, x: NormedRows, memory: tuple[Tensor, ...], step: Step) -> DeferredOutput:
        [state] = memory
        projected = self.in_proj(x, step).finished(self._kernels).to(self._weight.dtype)
        gate_in, gate_out, value = projected.chunk(3, dim=-1)
        mixed = self._kernels.causal_conv.conv(
            gate_in * value, self._weight, self._bias, state, step.memories[self._family], None
        )
        return self.out_proj(gate_out * mixed, step)

    def weights(self, name: str) -> Fills:
        yield from self.in_proj.weights(f"{name}.in_proj")
        yield from self.out_proj.weights(f"{name}.out_proj")
        # A checkpoint stores it as a convolution with one input channel each.
        yield f"{name}.conv.weight", Fill(self._weight.unsqueeze(1), 0, self._shard)
        if self._bias is not None:
            yield f"{name}.conv.bias", Fill(self._bias, 0, self._shard)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.in_proj.lora_parts(f"{name}.in_proj")
        yield from self.out_proj.lora_parts(f"{name}.out_proj")

    def products(self) -> Iterator[Linear]:
        yield from (self.in_proj, self.out_proj)
