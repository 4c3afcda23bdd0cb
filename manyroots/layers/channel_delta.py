"""Kimi Linear's delta attention: the delta rule with a decay for each channel of a key.

    q, k, v = silu(conv(q_proj(x), k_proj(x), v_proj(x)))
    decay = f_b_proj(f_a_proj(x));  gate = g_b_proj(g_a_proj(x));  beta = b_proj(x)
    o_proj(norm(channel_delta(q, k, v, decay, beta)) * sigmoid(gate))

It remembers the convolution's last inputs, and a float32 matrix for each head. Ranks divide the
heads; the gates' narrow first products are replicated on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import ChannelDeltaSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import Side
from manyroots.store.adapter_sites import SitePart

PARTS = ("q", "k", "v")
FORGET = "forget_gate"
"""The checkpoint's folder of the decays' weights."""


class ChannelDeltaNet:
    """Its products, a convolution, the delta rule, a norm with a gate and o."""

    def __init__(self, spec: ChannelDeltaSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._spec, self._family = spec, family
        self._kernels, self._shard, self._eps = context.kernels, context.shard, context.eps
        hidden, inner, dim = context.hidden_size, spec.inner, spec.head_dim
        # Decays and gates are among the outputs.
        exact = context.unquantized
        widths = {**{f"{part}_proj": inner for part in PARTS}, "b_proj": spec.num_heads}
        self.qkvb = Linear(hidden, widths, exact, bias=False, side=Side.OUTPUT)
        self.f_a, self.g_a = (
            Linear(hidden, {"": dim}, exact, bias=False, side=None) for _ in range(2)
        )
        self.f_b, self.g_b = (
            Linear(dim, {"": inner}, exact, bias=False, side=Side.OUTPUT) for _ in range(2)
        )
        self.o = Linear(inner, {"": hidden}, context, bias=False, side=Side.INPUT)
        self._filter = context.empty(3 * inner, spec.width)
        numbers = torch.empty(spec.num_heads * (1 + dim), device=context.device)
        self._a_log, self._dt_bias = numbers[: spec.num_heads], numbers[spec.num_heads :]
        self._norm = context.empty(dim)

    @property
    def reader(self) -> Linear | None:
        """None: several products read its input."""
        return None

    def __call__(self, x: NormedRows, memory: tuple[Tensor, ...], step: Step) -> DeferredOutput:
        x = whole_rows(x)
        conv_state, matrix = memory
        rows = step.memories[self._family]
        spec, kernels = self._spec, self._kernels
        both = self._whole(self.qkvb, x, step)
        qkv = kernels.causal_conv.conv(
            both[:, : 3 * spec.inner], self._filter, None, conv_state, rows, "silu"
        )
        q, k, v = (self._by_head(part) for part in qkv.chunk(3, dim=1))
        decay, gate = (
            self._by_head(self._whole(second, self._whole(first, x, step), step))
            for first, second in ((self.f_a, self.f_b), (self.g_a, self.g_b))
        )
        bias = self._dt_bias.view(spec.num_heads, spec.head_dim)
        gates = DeltaGates(decay, both[:, 3 * spec.inner :], self._a_log, bias)
        read = kernels.delta_rule.channel_delta(q, k, v, gates, matrix, rows)
        normed = kernels.norm.rms_norm(read.flatten(0, 1), self._norm, self._eps)
        gated = kernels.gated_norm.sigmoid_gated(normed.view(read.shape), gate)
        return self.o(gated.flatten(1), step)

    def _whole(self, linear: Linear, x: Tensor, step: Step) -> Tensor:
        return linear(x, step).finished(self._kernels).to(self._filter.dtype)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), self._spec.num_heads, self._spec.head_dim)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the mixer `name`."""
        shard, heads = self._shard, self._spec.num_heads
        yield from self.qkvb.weights(name)
        for linear, own in self._named():
            yield from linear.weights(f"{name}.{own}")
        for part, place in zip(PARTS, self._filter.chunk(3), strict=True):
            yield f"{name}.{part}_conv1d.weight", Fill(place.unsqueeze(1), 0, shard)
        yield f"{name}.{FORGET}.A_log", Fill(self._a_log.view(1, 1, heads, 1), 2, shard)
        yield f"{name}.{FORGET}.dt_bias", Fill(self._dt_bias, 0, shard)
        yield f"{name}.o_norm.weight", Fill(self._norm)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the mixer `name` that adapters may change."""
        yield from self.qkvb.lora_parts(name)
        for linear, own in self._named():
            yield from linear.lora_parts(f"{name}.{own}")

    def products(self) -> Iterator[Linear]:
        yield self.qkvb
        for linear, _ in self._named():
            yield linear

    def _named(self) -> Iterator[tuple[Linear, str]]:
        """All products but the first, with their names in the checkpoint."""
        yield self.f_a, f"{FORGET}.f_a_proj"
        yield self.f_b, f"{FORGET}.f_b_proj"
        yield self.g_a, "g_a_proj"
        yield self.g_b, "g_b_proj"
        yield self.o, "o_proj"
