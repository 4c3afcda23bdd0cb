"""Mamba-2: a scan in which each token chooses its heads' decay.

    z, x, b, c, dt = in_proj(input)
    x, b, c = silu(conv(x, b, c))
    out_proj(norm(scan(x, dt, b, c), z))      a norm before the gate or after it, or no norm

It remembers the convolution's last inputs, and a float32 matrix for each head. Ranks divide heads,
and groups if there are several; a norm over all channels spans all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.mamba.inputs import MambaSteps
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import GatedNormKind, MambaSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart


class Mamba2:
    """in_proj, a convolution, the scan, a norm with a gate, and out_proj."""

    def __init__(self, spec: MambaSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._spec, self._family = spec, family
        self._kernels, self._shard, self._eps = context.kernels, context.shard, context.eps
        heads, inner = spec.num_heads, spec.inner
        shared = OutputPiece(spec.groups * spec.state_dim, is_whole=spec.shares_group)
        self._pieces = (OutputPiece(inner), shared, shared)
        """Pieces of the convolution's channels."""
        pieces = (OutputPiece(inner), *self._pieces, OutputPiece(heads))
        self.in_proj = Linear(
            context.hidden_size,
            {"": inner + spec.channels + heads},
            context.unquantized,  # steps and gates are among its outputs
            bias=spec.in_bias,
            side=Side.OUTPUT,
            pieces={"": pieces},
        )
        self.out_proj = Linear(
            inner, {"": context.hidden_size}, context, bias=spec.out_bias, side=Side.INPUT
        )
        self._filter = context.empty(spec.channels, spec.width)
        self._filter_bias = context.empty(spec.channels) if spec.conv_bias else None
        numbers = torch.empty(3, heads, dtype=torch.float32, device=context.device)
        self._a_log, self._dt_bias, self._skip = numbers
        self._norm: Tensor | None = None
        if spec.norm is not GatedNormKind.GATE_ONLY:
            self._norm = context.empty(inner)
        self._factors: Tensor | None = None
        if set(spec.part_factors) != {1.0}:
            pairs = zip(pieces, spec.part_factors, strict=True)
            factors = [factor for piece, factor in pairs for _ in range(piece.size)]
            self._factors = torch.tensor(factors, dtype=context.dtype, device=context.device)

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        return self.in_proj if self._spec.in_factor == 1.0 else None

    def __call__(self, x: NormedRows, memory: tuple[Tensor, ...], step: Step) -> DeferredOutput:
        conv_state, matrix = memory
        spec, rows = self._spec, step.memories[self._family]
        if spec.in_factor != 1.0:
            x = whole_rows(x) * spec.in_factor
        projected = self.in_proj(x, step).finished(self._kernels).to(self._filter.dtype)
        if self._factors is not None:
            projected = projected * self._factors
        sizes = [spec.inner, spec.channels, spec.num_heads]
        gate, xbc, dt = torch.split(projected, sizes, dim=1)
        xbc = self._kernels.causal_conv.conv(
            xbc, self._filter, self._filter_bias, conv_state, rows, "silu"
        )
        values, b, c = torch.split(xbc, [piece.size for piece in self._pieces], dim=1)
        groups = (-1, spec.groups, spec.state_dim)
        values = values.view(-1, spec.num_heads, spec.head_dim)
        steps = MambaSteps(dt, self._a_log, self._dt_bias, self._skip, spec.least_step)
        read = self._kernels.mamba.scan(values, b.view(groups), c.view(groups), steps, matrix, rows)
        given = self.out_proj(self._normed(read.flatten(1), gate), step)
        return given.with_factor(spec.out_factor)

    def _normed(self, read: Tensor, gate: Tensor) -> Tensor:
        kernels, spec = self._kernels.gated_norm, self._spec
        if self._norm is None:
            return kernels.gated(read, gate)
        gate_first = spec.norm is GatedNormKind.GATE_FIRST
        if spec.spans_ranks and not self._shard.is_whole:
            return self._normed_over_ranks(read, gate, self._norm, gate_first=gate_first)
        shape = (-1, spec.norm_groups, spec.inner // spec.norm_groups)
        normed: Tensor = kernels.gated_norm(
            read.view(shape), gate.view(shape), self._norm.view(shape[1:]), self._eps,
            gate_first=gate_first,
        )  # fmt: skip
        return normed.flatten(1)

    def _normed_over_ranks(
        self, read: Tensor, gate: Tensor, weight: Tensor, *, gate_first: bool
    ) -> Tensor:
        """Uses the mean square of all ranks' channels."""
        values, opened = read.float(), F.silu(gate.float())
        if gate_first:
            values = values * opened
        squares = self._shard.add_up(values.square().sum(1, keepdim=True))
        count = values.shape[1] * self._shard.size
        values = values * torch.rsqrt(squares / count + self._eps) * weight.float()
        return (values if gate_first else values * opened).to(read.dtype)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the mixer `name`."""
        shard, pieces = self._shard, self._pieces
        yield from self.in_proj.weights(f"{name}.in_proj")
        yield from self.out_proj.weights(f"{name}.out_proj")
        # A checkpoint stores it as a convolution with one input channel each.
        place = self._filter.unsqueeze(1)
        yield f"{name}.conv1d.weight", Fill(place, 0, shard, pieces=pieces)
        if self._filter_bias is not None:
            yield f"{name}.conv1d.bias", Fill(self._filter_bias, 0, shard, pieces=pieces)
        yield f"{name}.A_log", Fill(self._a_log, 0, shard)
        yield f"{name}.dt_bias", Fill(self._dt_bias, 0, shard)
        yield f"{name}.D", Fill(self._skip, 0, shard)
        if self._norm is not None:
            yield f"{name}.norm.weight", Fill(self._norm, 0, shard)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the mixer `name` that adapters may change."""
        yield from self.in_proj.lora_parts(f"{name}.in_proj")
        yield from self.out_proj.lora_parts(f"{name}.out_proj")

    def products(self) -> Iterator[Linear]:
        yield from (self.in_proj, self.out_proj)
