"""Mixture of experts, naive: one token and one expert at a time, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.moe.routing import Routing


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """From router logits [tokens, experts] (or partial sums of them)."""
    total = logits.float() if logits.dim() == 2 else logits.float().sum(0)
    weights, experts = total.softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=total.shape[1])
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    pairs = flat.argsort(stable=True)
    return Routing(weights, pairs.int(), starts.int())


def experts(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each pair's weighted output, float32 [tokens, top_k, hidden].

    gate_up is [experts, 2 n, hidden] (gates first), down is [experts, hidden, n].
    """
    top_k = routing.weights.shape[1]
    out = torch.zeros(x.shape[0] * top_k, x.shape[1], device=x.device)
    weights = routing.weights.flatten()
    starts = routing.starts.tolist()
    for expert in range(gate_up.shape[0]):
        for pair in routing.pairs[starts[expert] : starts[expert + 1]].tolist():
            gate, up = (gate_up[expert].float() @ x[pair // top_k].float()).chunk(2)
            hidden = (F.silu(gate) * up).to(x.dtype).float()
            out[pair] = weights[pair] * (down[expert].float() @ hidden)
    return out.view(x.shape[0], top_k, -1)
