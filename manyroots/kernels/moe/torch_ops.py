"""Products with the weights of experts, with torch's own operators.

Same signatures as `reference.py`. One matrix product per expert that has tokens, over all of its
tokens at once; an expert without tokens is not touched. The loop is on the host, so on a GPU it
waits for the router once per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.moe.routing import SortedRouting


def grouped_linear(x: Tensor, weight: Tensor, routing: SortedRouting) -> Tensor:
    """Each pair's x [num_pairs, in] times its expert's weight [num_experts, out, in]."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, pairs in routing.segments:
        torch.mm(x[pairs], weight[expert].t(), out=out[pairs])
    return out


def combine(out: Tensor, routing: SortedRouting) -> Tensor:
    """The weighted sum of each token's pairs: out [num_pairs, size] to [num_tokens, size].

    Each token collects its pairs instead of pairs being added onto tokens: the order of the sum
    is then the same on every run and in every batch, and half precision sums in float32.
    """
    by_token = out[routing.pair_index]
    return by_token.mul_(routing.weight[routing.pair_index].unsqueeze(-1)).sum(dim=1)
