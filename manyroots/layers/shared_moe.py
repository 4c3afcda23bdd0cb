"""Experts and a shared block that every token goes through, perhaps with a gate.

experts(x) + sigmoid(gate(x)) * shared(x)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from manyroots.kernels.fused_moe.weights import ExpertWeights
from manyroots.kernels.lora_ops.sites import LinearSite
from manyroots.kernels.norm.deferred import NormedRows, whole_rows
from manyroots.layers.context import LayerContext
from manyroots.layers.deferred_output import DeferredOutput
from manyroots.layers.linear import Linear
from manyroots.layers.mlp import GatedMLP
from manyroots.layers.moe import SparseMLP
from manyroots.layers.spec import SharedSpec
from manyroots.layers.step import Step
from manyroots.layers.weights.fill import Fills
from manyroots.store.adapter_sites import SitePart


class SharedExpertMLP:
    """Replaces a `SparseMLP`."""

    def __init__(self, spec: SharedSpec, context: LayerContext) -> None:
        """`spec` is the rank's own."""
        self._spec, self._kernels = spec, context.kernels
        self.sparse = SparseMLP(spec.experts, context)
        self.shared = GatedMLP(spec.shared, context)
        self.gate: Linear | None = None
        if spec.gate is not None:
            self.gate = Linear(
                context.hidden_size, {"": 1}, context.unquantized, bias=False, side=None
            )

    @property
    def reader(self) -> Linear | None:
        """None: several products read its input."""
        return None

    def __call__(self, x: NormedRows, step: Step) -> DeferredOutput:
        x = whole_rows(x)
        if self.gate is None and (joined := self._joined(len(x), step)):
            return self.sparse(x, step, joined, self._pooled)
        shared, chosen = self.shared(x, step), self.sparse(x, step)
        if self.gate is None:
            assert shared.factor == chosen.factor == 1.0
            shared = shared.for_many(self._kernels)
            return DeferredOutput(chosen.sums, shared.lora, also=shared.sums)
        norm = self._kernels.gated_norm
        weight = self.gate.weight.data
        if step.lora is None and isinstance(weight, Tensor):
            # The gate is one number per token, computed by the kernel that adds up.
            return DeferredOutput(norm.add_gated(chosen.sums, shared.sums, x, weight[0]))
        gate = self.gate(x, step).finished(self._kernels)
        gated = norm.sigmoid_gated(shared.finished(self._kernels), gate)
        return DeferredOutput(chosen.finished(self._kernels) + gated)

    @property
    def _pooled(self) -> tuple[LinearSite, LinearSite] | None:
        """The offsets of adapters' weights for the shared block's two products."""
        gate_up, down = self.shared.gate_up.pooled, self.shared.down.pooled
        return None if gate_up is None or down is None else (gate_up, down)

    def _joined(self, num_tokens: int, step: Step) -> ExpertWeights | None:
        """The shared block as one more expert, if that is faster and its weights allow it."""
        block, spec, experts = self.shared, self._spec.shared, self.sparse.experts.data
        gate_up, down = block.gate_up.weight.data, block.down.weight.data
        if (
            num_tokens > self._kernels.fused_moe.MOST_JOINED_TOKENS
            # Adapters may be limited to some products.
            or (step.lora is not None and None in (self._pooled, self.sparse.pooled))
            or spec.activation is not experts.activation
            or spec.bias
            or not spec.is_gated
            or spec.gate_factor != 1.0
            or spec.down_factor != 1.0
            or not all(isinstance(one, Tensor) for one in (gate_up, down, experts.gate_up))
        ):
            return None
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        return ExpertWeights(gate_up[None], down[None], activation=spec.activation)

    def weights(self, name: str) -> Fills:
        """Destinations of a checkpoint's tensors for the layer `name`."""
        spec = self._spec
        yield from self.sparse.weights(f"{name}.{spec.experts.name}")
        yield from self.shared.weights(f"{name}.{spec.shared.name}")
        if self.gate is not None:
            yield from self.gate.weights(f"{name}.{spec.gate}")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """The parts of the layer `name` that adapters may change."""
        spec = self._spec
        yield from self.sparse.lora_parts(f"{name}.{spec.experts.name}")
        yield from self.shared.lora_parts(f"{name}.{spec.shared.name}")
        if self.gate is not None:
            yield from self.gate.lora_parts(f"{name}.{spec.gate}")

    def products(self) -> Iterator[Linear]:
        yield from self.sparse.products()
        yield from self.shared.products()
        if self.gate is not None:
            yield self.gate
