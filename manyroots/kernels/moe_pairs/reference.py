"""Mixture of experts, naive: one token and one expert at a time, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.lora_sites.reference import expanded
from manyroots.kernels.lora_sites.sites import LoraTerm
from manyroots.kernels.moe_pairs.adapters import PART_WIDTH, ExpertAdapters, ExpertSite
from manyroots.kernels.moe_pairs.routing import Routing


def route(
    logits: Tensor, top_k: int, lora: LoraTerm | None = None, *, renormalise: bool
) -> Routing:
    """From router logits [tokens, experts] (or partial sums of them), and what adapters add."""
    total = logits.float() if logits.dim() == 2 else logits.float().sum(0)
    if lora is not None:
        total = total + expanded(lora)
    weights, experts = total.softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=total.shape[1])
    ends = counts.cumsum(0)
    ids = torch.arange(len(counts), device=flat.device)
    groups = torch.stack((ids, ends - counts, ends), dim=1)
    used_first = (counts == 0).int().argsort(stable=True)
    order = flat.argsort(stable=True).int()
    return Routing(weights, order, groups[used_first].int(), experts.int())


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
    for expert, begin, end in routing.groups.tolist():
        for pair in routing.pairs[begin:end].tolist():
            token = pair // top_k
            both = gate_up[expert].float() @ x[token].float()
            if adapters is not None:
                both += _delta(x[token], adapters.gate_up, int(adapters.slots[token]), expert)
            gate, up = both.chunk(2)
            hidden = (F.silu(gate) * up).to(x.dtype)
            y = down[expert].float() @ hidden.float()
            if adapters is not None:
                y += _delta(hidden, adapters.down, int(adapters.slots[token]), expert)
            out[pair] = weights[pair] * y
    return out.view(x.shape[0], top_k, -1)


def _delta(x: Tensor, site: ExpertSite, slot: int, expert: int) -> Tensor:
    """What a slot adds to one expert's product of x."""
    found = []
    for part, size in enumerate(site.part_sizes):
        if slot < 0:
            found.append(torch.zeros(size, device=x.device))
            continue
        entry = site.table[slot, PART_WIDTH * part : PART_WIDTH * (part + 1)].tolist()
        a_offset, a_step, rank, b_offset, b_step = entry
        a_at, b_at = a_offset + expert * a_step, b_offset + expert * b_step
        a = site.pool[a_at : a_at + rank * len(x)].view(rank, len(x))
        b = site.b(b_at, size, rank)
        h = site.scalings[slot, part] * (a.float() @ x.float())
        found.append(b.float() @ h.to(b.dtype).float())
    return torch.cat(found)
