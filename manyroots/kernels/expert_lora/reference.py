"""Adapters of experts, naive: one pair at a time, in float32.

Obviously right and slow; every other file of this folder that computes has the same signatures
and is compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.expert_lora.pairs import AdapterPairs
from manyroots.kernels.lora_sites.weights import LowRank, Site, SlotWeights


def add_to_pairs(y: Tensor, x: Tensor, site: Site, pairs: AdapterPairs) -> None:
    """Add each pair's adapter to y [num_pairs, out] = W x, in place; x is [num_tokens, in]."""
    routing, weights = pairs.routing, _weights_by_token(pairs)
    places = zip(routing.token_index.tolist(), routing.expert_index.tolist(), strict=True)
    for pair, (token, expert) in enumerate(places):
        if token in weights:
            for low in weights[token].experts.get(site, ()):
                y[pair] += _delta(x[token], low, expert).to(y.dtype)


def combine(y: Tensor, x: Tensor, site: Site, pairs: AdapterPairs) -> Tensor:
    """The weighted sum of each token's pairs with their adapters: [num_tokens, out].

    y [num_pairs, out] = W x is used up; x is [num_pairs, in].
    """
    routing, weights = pairs.routing, _weights_by_token(pairs)
    summed = torch.zeros(routing.pair_index.shape[0], y.shape[1], device=y.device)
    places = zip(routing.token_index.tolist(), routing.expert_index.tolist(), strict=True)
    for pair, (token, expert) in enumerate(places):
        out = y[pair].float()
        if token in weights:
            for low in weights[token].experts.get(site, ()):
                out = out + _delta(x[pair], low, expert)
        summed[token] += routing.weight[pair].float() * out
    return summed.to(y.dtype)


def _weights_by_token(pairs: AdapterPairs) -> dict[int, SlotWeights]:
    return {
        token: run.weights
        for run in pairs.batch.runs
        for token in range(run.tokens.start, run.tokens.stop)
    }


def _delta(x: Tensor, low: LowRank, expert: int) -> Tensor:
    """float32 [out] of the whole product."""
    delta = torch.zeros(low.out_features, device=x.device)
    h = low.a[expert % low.a.shape[0]].float() @ x.float()
    for part in low.parts:
        delta[part.columns] += h[part.ranks] @ part.b[expert % part.b.shape[0]].float()
    return delta
