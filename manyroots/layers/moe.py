"""The feed-forward block of experts: the router chooses a few experts for each token.

Takes [num_tokens, hidden_size], normalised. Every expert is a gated block, but their weights are
stacked, and a step computes them together; see `kernels/fused_moe`.

    x -> router -> pairs of (token, expert)
      -> gate, up -> activation -> down          of each pair, with its expert's weights
      -> sum over a token's pairs, weighted by the router

Adapters add to the router's scores before the choice, to a pair's gate and up before the
activation, and to its down before it is weighted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from manyroots.kernels.fused_moe.adapters import ExpertAdapters, ExpertSite
from manyroots.kernels.fused_moe.weights import ExpertMatrix, ExpertWeights
from manyroots.kernels.lora_ops.sites import LinearSite
from manyroots.kernels.norm.deferred import NormedRows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.spec import ExpertsSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fill, FilledRows, Fills
from manyroots.lora.targets import Side, TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart

PARTS = ("gate_proj", "up_proj", "down_proj")
"""An expert's projections."""


class Experts:
    """The stacked weights of all experts of one block."""

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        self._spec, self._context, self._format = spec, context, context.format.for_experts
        hidden_size, count, inner = context.hidden_size, spec.num_experts, spec.intermediate_size
        kind, both = TargetKind.EXPERTS, {"gate_proj": inner, "up_proj": inner}

        def site(in_features: int, parts: dict[str, int], side: Side) -> LoraSite:
            turns = spec.is_interleaved
            return LoraSite(
                kind, in_features, parts, num_experts=count, is_interleaved=turns, side=side
            )

        self.gate_up_site = site(hidden_size, both, Side.OUTPUT)
        self.down_site = site(inner, {"down_proj": hidden_size}, Side.INPUT)

    @cached_property
    def data(self) -> ExpertWeights:
        """Made when it is first used: a checkpoint's names for it determine its format."""
        spec, context, hidden_size = self._spec, self._context, self._context.hidden_size
        count, inner = spec.num_experts, spec.intermediate_size

        def matrices(rows: int, columns: int) -> ExpertMatrix:
            return self._format.experts(
                count, rows, columns, dtype=context.dtype, device=context.device
            )

        return ExpertWeights(
            gate_up=matrices(2 * inner, hidden_size),
            down=matrices(hidden_size, inner),
            gate_up_bias=context.empty(count, 2 * inner) if spec.bias else None,
            down_bias=context.empty(count, hidden_size) if spec.bias else None,
            activation=spec.activation,
        )

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors: each expert's three matrices, as views of the
        stack."""
        experts = range(self._spec.num_experts)
        names = (f"{name}.{expert}.{part}" for expert in experts for part in PARTS)
        self._format = self._context.format.of(names).for_experts
        inner, shard, data = self._spec.intermediate_size, self._context.shard, self.data
        fills, dtype = self._format.fills, self._context.dtype
        gates, ups, every = slice(0, inner), slice(inner, None), slice(None)
        for expert in experts:
            own, gate_up = f"{name}.{expert}", data.gate_up[expert]
            for part, matrix, rows, side in (
                ("gate_proj", gate_up, gates, Side.OUTPUT),
                ("up_proj", gate_up, ups, Side.OUTPUT),
                ("down_proj", data.down[expert], every, Side.INPUT),
            ):
                yield from fills(matrix, FilledRows(f"{own}.{part}", rows, side, shard, dtype))
        if data.gate_up_bias is None or data.down_bias is None:
            return
        biases = zip(data.gate_up_bias, data.down_bias, strict=True)
        for expert, (gate_up, down) in enumerate(biases):
            own = f"{name}.{expert}"
            yield f"{own}.gate_proj.bias", Fill(gate_up[:inner], 0, shard)
            yield f"{own}.up_proj.bias", Fill(gate_up[inner:], 0, shard)
            yield f"{own}.down_proj.bias", Fill(down, shard=shard, is_first_only=True)

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts that adapters may change: each projection of all experts is one part."""
        yield from self.gate_up_site.targets(name)
        yield from self.down_site.targets(name)


class SparseMLP:
    """A router and its experts; replaces a `GatedMLP`."""

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        """`spec` is the rank's own."""
        self._spec, self._kernels = spec, context.kernels
        # The choice adds the router's bias, because it reads the scores anyway.
        self.router = Linear(
            context.hidden_size, {"": spec.num_experts}, context.unquantized, bias=False, side=None
        )
        self._router_bias = context.empty(spec.num_experts) if spec.bias else None
        if spec.has_correction:
            assert not spec.bias, "one of the two"
            self._router_bias = torch.empty(
                spec.num_experts, dtype=torch.float32, device=context.device
            )
        self._table: Tensor | None = None
        """[vocabulary, experts of a token], where no token chooses."""
        if spec.vocab_size is not None:
            tokens = torch.arange(spec.vocab_size, device=context.device)
            places = torch.arange(spec.experts_per_token, device=context.device)
            self._table = (tokens[:, None] + places) % spec.num_experts
        self.experts = Experts(spec, context)
        self.pooled: tuple[ExpertSite, ExpertSite] | None = None
        """The offsets of adapters' weights for the experts' two products; None without adapters."""

    @property
    def reader(self) -> Linear | None:
        """None: both the router and the experts read its input."""
        return None

    def __call__(
        self,
        x: NormedRows,
        step: Step,
        shared: ExpertWeights | None = None,
        of_shared: tuple[LinearSite, LinearSite] | None = None,
    ) -> DeferredOutput:
        """`shared`: a block that all tokens go through, to be added, and its sites; see
        `kernels/fused_moe`."""
        if not isinstance(x, Tensor):
            raise TypeError("experts read rows that are whole")
        scores = self.router(x, step).for_many(self._kernels)
        spec, moe = self._spec, self._kernels.fused_moe
        routing = moe.route(
            scores.sums, spec.experts_per_token, scores.lora,
            scoring=spec.scoring, bias=self._router_bias, factor=spec.factor, groups=spec.groups,
            chosen=self._given(step),
        )  # fmt: skip
        return DeferredOutput(
            moe.experts(x, routing, self.experts.data, self._adapters(step, of_shared), shared)
        )

    def _given(self, step: Step) -> Tensor | None:
        """Each token's experts, where a table says them."""
        if self._table is None:
            return None
        assert step.tokens is not None, "the decoder adds them"
        return self._table[step.tokens]

    def _adapters(
        self, step: Step, of_shared: tuple[LinearSite, LinearSite] | None
    ) -> ExpertAdapters | None:
        if step.lora is None or self.pooled is None:
            return None
        return ExpertAdapters(*self.pooled, step.lora, of_shared)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the block `name`."""
        router = f"{name}.{self._spec.router}"
        yield from self.router.weights(router)
        if self._router_bias is not None:
            kind = "e_score_correction_bias" if self._spec.has_correction else "bias"
            yield f"{router}.{kind}", Fill(self._router_bias)
        if self._table is not None:
            yield f"{router}.tid2eid", Fill(self._table)
        yield from self.experts.weights(f"{name}.experts")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the block `name` that adapters may change."""
        yield from self.router.lora_parts(f"{name}.{self._spec.router}")
        yield from self.experts.lora_parts(f"{name}.experts")

    def products(self) -> Iterator[Linear]:
        yield self.router
