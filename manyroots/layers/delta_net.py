"""The gated delta net: linear attention in which each token corrects the state.

    q, k, v, z, b, a = in_proj(x)
    q, k, v = silu(conv(q, k, v))
    out_proj(norm(gated_delta(q, k, v, decay=a, beta=b)) * silu(z))

It remembers the convolution's last inputs, and a float32 matrix for each head. Ranks divide key
heads, each with the value heads that read it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.kernels.delta_rule.inputs import DeltaGates
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import DeltaSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart


class GatedDeltaNet:
    """The projections as one product, a convolution, the delta rule, a gated norm and out_proj."""

    def __init__(self, spec: DeltaSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step. Its norm's
        weights have no offset, whatever that of the other norms."""
        self._spec, self._family = spec, family
        self._kernels, self._shard, self._eps = context.kernels, context.shard, context.eps
        heads = spec.num_heads
        key, value = spec.key_heads * spec.key_dim, heads * spec.value_dim
        self._pieces = (OutputPiece(key), OutputPiece(key), OutputPiece(value))
        if spec.is_fused:
            parts = {"in_proj_qkvz": 2 * key + 2 * value, "in_proj_ba": 2 * heads}
        else:
            parts = {
                "in_proj_qkv": 2 * key + value,
                "in_proj_z": value,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
        self.in_proj = Linear(
            context.hidden_size,
            parts,
            context.unquantized,  # decays and gates are among its outputs
            bias=False,
            side=Side.OUTPUT,
            pieces=None if spec.is_fused else {"in_proj_qkv": self._pieces},
        )
        self.out_proj = Linear(
            value, {"": context.hidden_size}, context, bias=False, side=Side.INPUT
        )
        self._filter = context.empty(spec.channels, spec.width)
        numbers = torch.empty(2, heads, dtype=torch.float32, device=context.device)
        self._a_log, self._dt_bias = numbers
        self._norm = context.empty(spec.value_dim)

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        return self.in_proj

    def __call__(self, x: NormedRows, memory: tuple[Tensor, ...], step: Step) -> DeferredOutput:
        conv_state, matrix = memory
        rows = step.memories[self._family]
        projected = self.in_proj(x, step).finished(self._kernels).to(self._filter.dtype)
        qkv, z, beta, decay = self._parts(projected)
        qkv = self._kernels.causal_conv.conv(qkv, self._filter, None, conv_state, rows, "silu")
        q, k, v = self._heads(qkv)
        gates = DeltaGates(decay, beta, self._a_log, self._dt_bias)
        read = self._kernels.delta_rule.gated_delta(q, k, v, gates, matrix, rows)
        normed = self._kernels.gated_norm.gated_norm(
            read, z, self._norm, self._eps, gate_first=False
        )
        return self.out_proj(normed.flatten(1), step)

    def _parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Views of a product: the convolution's input, in groups of channels; then gates, betas and
        decays, by key head and its value heads."""
        spec = self._spec
        heads, groups = spec.num_heads, spec.key_heads
        each, value = heads // groups, heads * spec.value_dim
        if spec.is_fused:
            # A key head's query, key, values and gates are adjacent; so are its betas and decays.
            qkvz, ba = torch.split(projected, [spec.channels + value, 2 * heads], dim=1)
            sizes = [spec.channels // groups, value // groups]
            qkv, z = torch.split(_in(qkvz, groups, -1), sizes, dim=2)
            beta, decay = _in(ba, groups, -1).chunk(2, dim=2)
            return qkv, _in(z, each, -1), beta, decay
        qkv, z, beta, decay = torch.split(projected, [spec.channels, value, heads, heads], dim=1)
        beta, decay = _in(beta, groups, each), _in(decay, groups, each)
        return qkv, _in(z, groups, each, -1), beta, decay

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [num_tokens, key heads, ...] of the convolution's output, whose
        channels have the order of its input."""
        spec = self._spec
        groups, each = spec.key_heads, spec.num_heads // spec.key_heads
        sizes = [piece.size for piece in self._pieces]
        if spec.is_fused:
            by_group = [size // groups for size in sizes]
            q, k, v = torch.split(_in(qkv, groups, -1), by_group, dim=2)
        else:
            q, k, v = (_in(x, groups, -1) for x in torch.split(qkv, sizes, dim=1))
        return q, k, _in(v, each, -1)

    def _order(self) -> tuple[int, ...]:
        """The checkpoint's channel for each channel of the convolution. A checkpoint has all
        queries first; a fused product orders channels by key head."""
        groups = self._spec.key_heads
        if not self._spec.is_fused:
            return ()
        first, pieces = 0, []
        for piece in self._pieces:
            pieces.append(torch.arange(first, first + piece.size).view(groups, -1))
            first += piece.size
        return tuple(torch.cat(pieces, dim=1).flatten().tolist())

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the mixer `name`."""
        shard = self._shard
        yield from self.in_proj.weights(name)
        yield from self.out_proj.weights(f"{name}.out_proj")
        # A checkpoint stores it as a convolution with one input channel each.
        place = self._filter.unsqueeze(1)
        yield (
            f"{name}.conv1d.weight",
            Fill(place, 0, shard, pieces=self._pieces, order=self._order()),
        )
        yield f"{name}.A_log", Fill(self._a_log, 0, shard)
        yield f"{name}.dt_bias", Fill(self._dt_bias, 0, shard)
        yield f"{name}.norm.weight", Fill(self._norm)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the mixer `name` that adapters may change."""
        yield from self.in_proj.lora_parts(name)
        yield from self.out_proj.lora_parts(f"{name}.out_proj")

    def products(self) -> Iterator[Linear]:
        yield from (self.in_proj, self.out_proj)


def _in(x: Tensor, *sizes: int) -> Tensor:
    """A view with its last dimension split into several."""
    return x.view(*x.shape[:-1], *sizes)
