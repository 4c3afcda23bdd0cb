"""Mixture of experts, naive: one token and one expert at a time, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.moe_pairs.routing import Routing


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """From router logits [tokens, experts] (or partial sums of them)."""
    total = logits.float() if logits.dim() == 2 else logits.float().sum(0)
    weights, experts = total.softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=total.shape[1])
    ends = counts.cumsum(0)
    ids = torch.arange(len(counts), device=flat.device)
    groups = torch.stack((ids, ends - counts, ends), dim=1)
    used_first = (counts == 0).int().argsort(stable=True)
    return Routing(weights, flat.argsort(stable=True).int(), groups[used_first].int())


def experts(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each pair's weighted output, float32 [tokens, top_k, hidden].

    gate_up is [experts, 2 n, hidden] (gates first), down is [experts, hidden, n].
    """
    top_k = routing.weights.shape[1]
    out = torch.zeros(x.shape[0] * top_k, x.shape[1], device=x.device)
    weights = routing.weights.flatten()
    for expert, begin, end in routing.groups.tolist():
        for pair in routing.pairs[begin:end].tolist():
            gate, up = (gate_up[expert].float() @ x[pair // top_k].float()).chunk(2)
            hidden = (F.silu(gate) * up).to(x.dtype).float()
            out[pair] = weights[pair] * (down[expert].float() @ hidden)
    return out.view(x.shape[0], top_k, -1)
