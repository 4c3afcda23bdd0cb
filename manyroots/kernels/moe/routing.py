"""Which experts each token goes to: the router's scores made into pairs, sorted by expert.

Takes router logits; gives a `SortedRouting`, worked out once per layer and step, read by every
product with an expert's weight. Knows nothing of weights. Nothing in `route` waits for the
device; only `SortedRouting.segments`, which host loops ask for, does.

A *pair* is one token at one of its experts. Pairs of one expert lie together, in the order of
their tokens, so that an expert's product is one slice:

    expert 0     expert 2          expert 3
    |t0 t1 t4|   |t0 t2|           |t1 t2 t4|      expert_starts = 0 3 3 5 8
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class SortedRouting:
    """The pairs of one layer in one step, sorted by expert."""

    token_index: Tensor
    """[num_pairs], the token of each pair."""
    expert_index: Tensor
    """[num_pairs], the expert of each pair, ascending."""
    weight: Tensor
    """[num_pairs], how much of the expert's output the token takes; in the activations' dtype."""
    expert_starts: Tensor
    """[num_experts + 1] int32: the pairs of expert e are expert_starts[e] to [e + 1]."""
    pair_index: Tensor
    """[num_tokens, experts_per_token], where the pairs of each token lie, best expert first."""

    @cached_property
    def segments(self) -> list[tuple[int, slice]]:
        """(expert, its pairs) for each expert that has any; on the host."""
        starts = pairwise(self.expert_starts.tolist())
        return [(expert, slice(*ends)) for expert, ends in enumerate(starts) if ends[0] < ends[1]]


def route(logits: Tensor, *, experts_per_token: int, normalize: bool) -> SortedRouting:
    """Send each token to its likeliest experts; `normalize` makes its weights add up to one.

    Probabilities are float32 over all experts whatever the dtype of logits [num_tokens,
    num_experts], and only the chosen ones are rounded: in half precision experts would tie.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weight, chosen = torch.topk(probabilities, experts_per_token, dim=-1)
    if normalize:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    # Stable, so that the same tokens always meet in the same order.
    expert_index, order = torch.sort(chosen.flatten(), stable=True)
    pair_index = torch.empty_like(order)
    pair_index[order] = torch.arange(order.numel(), device=order.device)
    experts = torch.arange(logits.shape[1] + 1, device=order.device)
    return SortedRouting(
        token_index=order // experts_per_token,
        expert_index=expert_index,
        weight=weight.to(logits.dtype).flatten()[order],
        expert_starts=torch.searchsorted(expert_index, experts, out_int32=True),
        pair_index=pair_index.view(chosen.shape),
    )
