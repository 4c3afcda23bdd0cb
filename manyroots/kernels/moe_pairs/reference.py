"""Mixture of experts, naive: one token and one expert at a time, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.moe_pairs.adapters import ENTRIES_PER_PART, ExpertAdapters, ExpertSite
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
    return Routing(
        weights, experts.int(), flat.argsort(stable=True).int(), groups[used_first].int()
    )


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Each pair's weighted output, float32 [tokens, top_k, hidden].

    gate_up is [experts, 2 n, hidden] (gates first), down is [experts, hidden, n].
    """
    top_k = routing.weights.shape[1]
    out = torch.zeros(x.shape[0] * top_k, x.shape[1], device=x.device)
    weights = routing.weights.flatten()
    for pair, expert in enumerate(routing.experts.flatten().tolist()):
        token = pair // top_k
        both = gate_up[expert].float() @ x[token].float()
        if adapters is not None:
            both += _delta(x[token], adapters.gate_up, int(adapters.slots[token]), expert)
        gate, up = both.chunk(2)
        hidden = (F.silu(gate) * up).to(x.dtype)
        result = down[expert].float() @ hidden.float()
        if adapters is not None:
            result += _delta(hidden, adapters.down, int(adapters.slots[token]), expert)
        out[pair] = weights[pair] * result
    return out.view(x.shape[0], top_k, -1)


def _delta(x: Tensor, site: ExpertSite, slot: int, expert: int) -> Tensor:
    """What a slot's adapter adds to one expert's product with x: float32 [sum of part sizes]."""
    out = torch.zeros(sum(site.part_sizes), device=x.device)
    if slot < 0:
        return out
    _, *entries = site.table[slot].tolist()
    column = 0
    for part, size in enumerate(site.part_sizes):
        here = ENTRIES_PER_PART * part
        _, rank, a, a_step, b, b_step = entries[here : here + ENTRIES_PER_PART]
        first, second = a + expert * a_step, b + expert * b_step
        shrink = site.pool[first : first + rank * len(x)].view(rank, len(x)).float()
        expand = site.pool[second : second + size * rank].view(size, rank).float()
        out[column : column + size] = expand @ (site.scalings[slot, part] * (shrink @ x.float()))
        column += size
    return out
