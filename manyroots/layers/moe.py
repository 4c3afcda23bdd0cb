"""The feed-forward block of experts: each token goes through the few that its router chooses.

Takes and gives [num_tokens, hidden_size]. Every expert is a `GatedMLP` of its own, but their
weights are kept stacked, and a step computes them grouped by expert; see `kernels/moe`.

    x -> router -> pairs of (token, expert), sorted by expert
      -> gate, up -> act(gate) * up -> down      of each pair, with its expert's weights
      -> sum over a token's pairs, weighted by the router

Adapters add to the router's scores before the choice, to a pair's gate and up before the
activation, and to its down before it is weighted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.expert_lora.pairs import AdapterPairs
from manyroots.kernels.lora.batch import AdapterBatch
from manyroots.kernels.moe import torch_ops
from manyroots.kernels.moe.routing import SortedRouting, route
from manyroots.layers.linear import Linear
from manyroots.layers.lora import add_to_pairs, combine_pairs
from manyroots.layers.mlp import activation_named
from manyroots.lora.targets import TargetKind
from manyroots.store.adapter_sites import LoraSite, SitePart


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """How many experts a block has, how large they are, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts add up to one."""


class Router:
    """A score per expert, and the choice that follows. Adapters add to the scores, so that a
    token of an adapter may go to other experts than the same token of the base model."""

    def __init__(
        self, hidden_size: int, spec: ExpertsSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.scores = Linear(hidden_size, spec.num_experts, bias=False, dtype=dtype, device=device)
        self.spec = spec

    def __call__(self, x: Tensor, adapters: AdapterBatch | None) -> SortedRouting:
        return route(
            self.scores(x, adapters),
            experts_per_token=self.spec.experts_per_token,
            normalize=self.spec.norm_topk_prob,
        )


class Experts:
    """The stacked weights of all experts of one block, and their grouped products."""

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        *,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._activation = activation_named(activation)
        self._intermediate_size = inter = spec.intermediate_size
        count = spec.num_experts
        self.gate_up = torch.empty(count, 2 * inter, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden_size, inter, dtype=dtype, device=device)
        kind, both = TargetKind.EXPERTS, {"gate_proj": inter, "up_proj": inter}
        self.gate_up_site = LoraSite(kind, hidden_size, both, num_experts=count)
        self.down_site = LoraSite(kind, inter, {"down_proj": hidden_size}, num_experts=count)

    def __call__(self, x: Tensor, routing: SortedRouting, adapters: AdapterBatch | None) -> Tensor:
        pairs = None if adapters is None else AdapterPairs(routing, adapters)
        by_pair = x.index_select(0, routing.token_index)
        gate_up = torch_ops.grouped_linear(by_pair, self.gate_up, routing)
        gate, up = add_to_pairs(gate_up, x, self.gate_up_site, pairs).chunk(2, dim=-1)
        activated = self._activation(gate).mul_(up)
        out = torch_ops.grouped_linear(activated, self.down, routing)
        return combine_pairs(out, activated, self.down_site, routing, pairs)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensors go: each expert's three matrices, as views of the stack."""
        inter = self._intermediate_size
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield f"{name}.{expert}.gate_proj.weight", gate_up[:inter]
            yield f"{name}.{expert}.up_proj.weight", gate_up[inter:]
            yield f"{name}.{expert}.down_proj.weight", down

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change: each projection of all experts is one."""
        yield from self.gate_up_site.targets(name)
        yield from self.down_site.targets(name)


class SparseMLP:
    """A router and its experts, in the place of a `GatedMLP`."""

    def __init__(
        self,
        hidden_size: int,
        spec: ExpertsSpec,
        *,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.router = Router(hidden_size, spec, dtype=dtype, device=device)
        self.experts = Experts(hidden_size, spec, activation=activation, dtype=dtype, device=device)

    def __call__(self, x: Tensor, adapters: AdapterBatch | None) -> Tensor:
        return self.experts(x, self.router(x, adapters), adapters)

    def weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Where a checkpoint's tensors for the block `name` go."""
        yield from self.router.scores.weights(f"{name}.gate")
        yield from self.experts.weights(f"{name}.experts")

    def lora_parts(self, name: str) -> Iterator[tuple[str, SitePart]]:
        """What adapters may change of the block `name`."""
        yield from self.router.scores.lora_parts(f"{name}.gate")
        yield from self.experts.lora_parts(f"{name}.experts")
