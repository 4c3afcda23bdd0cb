"""Products with the weights of experts, naive and obviously right: one pair at a time, float32.

Takes activations of pairs, in the order of a `SortedRouting`; gives those of pairs or of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.moe.routing import SortedRouting


def grouped_linear(x: Tensor, weight: Tensor, routing: SortedRouting) -> Tensor:
    """Each pair's x [num_pairs, in] times its expert's weight [num_experts, out, in]."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for pair, expert in enumerate(routing.expert_index.tolist()):
        out[pair] = (weight[expert].float() @ x[pair].float()).to(x.dtype)
    return out


def combine(out: Tensor, routing: SortedRouting) -> Tensor:
    """The weighted sum of each token's pairs: out [num_pairs, size] to [num_tokens, size]."""
    num_tokens = routing.pair_index.shape[0]
    summed = torch.zeros(num_tokens, out.shape[1], dtype=torch.float32, device=out.device)
    for pair, token in enumerate(routing.token_index.tolist()):
        summed[token] += routing.weight[pair].float() * out[pair].float()
    return summed.to(out.dtype)
