"""Attention over paged keys and values, with its projections.

Takes the normalised residual stream. Writes the keys and values of *all* tokens of the step into
their pages, then attends. The order matters: a sequence may read a page that another sequence fills
in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyroots.distributed.shard import WHOLE
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.norm import RMSNorm
from manyroots.layers.spec import AttentionSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, Fills
from manyroots.lora.targets import OutputPiece, Side
from manyroots.store.adapter_sites import SitePart


class Attention:
    """qkv, its norms and rotation, attention over pages, and o."""

    def __init__(self, spec: AttentionSpec, family: int, context: LayerContext) -> None:
        """`spec` is the rank's own; `family`: the index of its memory in the step."""
        self._spec, self._family = spec, family
        self._kernels, self._shard, self._dtype = context.kernels, context.shard, context.dtype
        heads, kv_heads, dim = spec.num_heads, spec.memory.kv_heads, spec.memory.head_dim
        queries = (2 if spec.has_gate else 1) * heads * dim
        parts = {"q_proj": queries, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        pieces = None
        if spec.is_fused:
            pieces = {"qkv_proj": tuple(OutputPiece(size) for size in parts.values())}
            parts = {"qkv_proj": sum(parts.values())}
        self.qkv = Linear(
            context.hidden_size, parts, context, bias=spec.qkv_bias, side=Side.OUTPUT, pieces=pieces
        )
        self.o = Linear(
            heads * dim, {"": context.hidden_size}, context, bias=spec.o_bias, side=Side.INPUT
        )
        self._qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        self._qk_norm: QkNorm | None = None
        if spec.qk_norm:
            q_width, k_width = (
                (heads * dim, kv_heads * dim) if spec.norm_spans_heads else (dim, dim)
            )
            q_norm, k_norm = RMSNorm(q_width, context), RMSNorm(k_width, context)
            self._qk_norms = (q_norm, k_norm)
            if not spec.norm_spans_heads:
                self._qk_norm = QkNorm(q_norm.weight, k_norm.weight, context.eps)
        self._sinks = context.empty(heads) if spec.has_sinks else None

    @property
    def reader(self) -> Linear | None:
        """The only product that reads its input."""
        return self.qkv if self._spec.in_factor == 1.0 else None

    def __call__(self, x: NormedRows, layer_kv: Tensor, step: Step) -> DeferredOutput:
        if self._spec.in_factor != 1.0:
            x = whole_rows(x) * self._spec.in_factor
        qkv = self.qkv(x, step)
        gates: Tensor | None = None
        if self._spec.has_gate:
            qkv, gates = self._without_gates(qkv, self._dtype)
        elif self._spec.norm_spans_heads:
            qkv = self._normed_over_heads(qkv)
        elif self._spec.is_fused:  # adapters, too, have all in one: the kernel cannot expand it
            qkv = DeferredOutput(qkv.finished(self._kernels))
        metadata = step.memories[self._family]
        q = self._kernels.qk_rope_kv_write.qk_rope_kv_write(
            qkv.sums, step.ropes[self._spec.rope], self._qk_norm, layer_kv, metadata.slot_mapping,
            qkv.lora, self._dtype,
        )  # fmt: skip
        attended = self._kernels.attention.attend(
            q, layer_kv, metadata, self._spec.scale, self._sinks, self._spec.cap
        )
        if gates is not None:
            attended = self._kernels.gated_norm.sigmoid_gated(attended, gates)
        return self.o(attended.flatten(1), step).with_factor(self._spec.out_factor)

    def _without_gates(
        self, qkv: DeferredOutput, dtype: torch.dtype
    ) -> tuple[DeferredOutput, Tensor]:
        """Queries, keys and values without the gates, and the gates [num_tokens, heads,
        head_dim]."""
        heads, dim = self._spec.num_heads, self._spec.memory.head_dim
        by_head = qkv.finished(self._kernels).to(dtype)
        by_head = by_head.view(by_head.shape[0], -1, dim)
        both, rest = by_head[:, : 2 * heads], by_head[:, 2 * heads :]
        return DeferredOutput(torch.cat((both[:, 0::2], rest), dim=1).flatten(1)), both[:, 1::2]

    def _normed_over_heads(self, qkv: DeferredOutput) -> DeferredOutput:
        """Queries and keys, each normalised over its heads on all ranks; values unchanged."""
        assert self._qk_norms is not None
        dim = self._spec.memory.head_dim
        widths = [self._spec.num_heads * dim, *[self._spec.memory.kv_heads * dim] * 2]
        q, k, v = torch.split(qkv.finished(self._kernels), widths, dim=1)
        both = (q.float(), k.float())
        squares = torch.stack([values.square().sum(1) for values in both])
        squares = self._shard.add_up(squares)  # both at once: one exchange between ranks
        normed = []
        for values, total, norm in zip(both, squares, self._qk_norms, strict=True):
            mean = total[:, None] / (values.shape[1] * self._shard.size)
            scaled = values * torch.rsqrt(mean + norm.eps) * norm.weight.float()
            normed.append(scaled.to(self._dtype))
        return DeferredOutput(torch.cat((*normed, v.to(self._dtype)), dim=1))

    def weights(self, name: str) -> Fills:
        yield from self.qkv.weights(name)
        yield from self.o.weights(f"{name}.{self._spec.o_name}")
        if self._qk_norms is not None:
            shard = self._shard if self._spec.norm_spans_heads else WHOLE
            for norm, own in zip(self._qk_norms, ("q_norm", "k_norm"), strict=True):
                yield from norm.weights(f"{name}.{own}", shard)
        if self._sinks is not None:
            yield f"{name}.sinks", Fill(self._sinks, cut=0, shard=self._shard)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        yield from self.qkv.lora_parts(name)
        yield from self.o.lora_parts(f"{name}.{self._spec.o_name}")

    def products(self) -> Iterator[Linear]:
        yield from (self.qkv, self.o)
