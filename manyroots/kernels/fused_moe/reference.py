"""Reference of the mixture of experts: one token and one expert at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.activation.reference import activate
from manyroots.kernels.fp8_rows import Fp8Form, in_fp8
from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertAdapters, ExpertSite
from manyroots.kernels.fused_moe.routing import (
    LEAST_SUM,
    MAX_FEW_TOKENS,
    ExpertGroups,
    Routing,
    Scoring,
    weights_by_expert,
)
from manyroots.kernels.fused_moe.weights import ExpertMatrix, ExpertWeights
from manyroots.kernels.lora_ops.reference import expanded, shrink
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.mxfp4 import Mxfp4Matrix
from manyroots.kernels.scaled import plain


def route(
    scores: Tensor,
    top_k: int,
    lora: LoraTerm | None = None,
    *,
    scoring: Scoring,
    bias: Tensor | None = None,
    factor: float = 1.0,
    groups: ExpertGroups | None = None,
    chosen: Tensor | None = None,
) -> Routing:
    """Choose experts from a router's scores [tokens, experts] (or partial sums of them), the
    adapters' additions and the router's bias [experts]. All weights are multiplied with `factor`.
    `groups`: restricts a token's experts to a few groups. `chosen` [tokens, top_k]: the
    experts, where a table gives them."""
    total = scores.float() if scores.dim() == 2 else scores.float().sum(0)
    if lora is not None:
        total = total + expanded(lora)
    added = 0.0 if bias is None else bias.float()
    if scoring.is_by_expert:
        own = weights_by_expert(total, scoring)
        if chosen is None:
            choice = within_groups(own + added, groups, by_best_two=True)
            _, experts = _largest(choice, top_k)
        else:
            experts = chosen
        weights = own.gather(1, experts)
    elif scoring is Scoring.SOFTMAX_OF_CHOSEN:
        best, experts = _largest(total + added, top_k)
        weights = best.softmax(-1)
    else:
        likely = within_groups((total + added).softmax(-1), groups, by_best_two=False)
        weights, experts = _largest(likely, top_k)
    if scoring.is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    weights = weights * factor
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=total.shape[1])
    ends = counts.cumsum(0)
    ids = torch.arange(len(counts), device=flat.device)
    lists = torch.stack((ids, ends - counts, ends), dim=1)
    used_first = (counts == 0).int().argsort(stable=True)
    order = flat.argsort(stable=True).int()
    return Routing(weights, order, lists[used_first].int(), experts.int())


def within_groups(scores: Tensor, groups: ExpertGroups | None, *, by_best_two: bool) -> Tensor:
    """Scores [tokens, experts], with -inf for experts in groups that a token does not choose. A
    group's score is that of its best expert, or the sum of its best two."""
    if groups is None:
        return scores
    by_group = scores.view(len(scores), groups.count, -1)
    size = min(2 if by_best_two else 1, by_group.shape[2])
    best = by_group.topk(size, dim=-1).values.sum(-1)
    _, chosen = _largest(best, groups.chosen)
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ties go to the lower index, which `topk` does not guarantee."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], places[:, :count]


MOST_JOINED_TOKENS = 16
"""As many as Triton's kernel takes."""


def experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    adapters: ExpertAdapters | None = None,
    shared: ExpertWeights | None = None,
) -> Tensor:
    """The terms of each token's output, float32 [top_k, tokens, hidden]: each pair's weighted
    output. With many tokens, inputs of FP8 experts are also rounded to FP8. `shared`: one expert
    that all tokens go through, with weight 1, whose output is one more term. It is for up to
    MOST_JOINED_TOKENS and plain weights."""
    if weights.is_fp4:
        weights = weights.plain(torch.float32)
    num_tokens, top_k = routing.weights.shape
    is_many = routing.tiles is not None or num_tokens > MAX_FEW_TOKENS
    rounds = is_many and weights.has_fp8_tiles
    out = torch.zeros(num_tokens * top_k, x.shape[1], device=x.device)
    pair_weights = routing.weights.flatten()
    for expert, begin, end in routing.groups.tolist():
        for pair in routing.pairs[begin:end].tolist():
            token = pair // top_k
            both = _product(x[token], weights.gate_up, weights.gate_up_bias, expert, rounds)
            if adapters is not None:
                both += _delta(x[token], adapters.gate_up, int(adapters.rows.slots[token]), expert)
            gate, up = both.chunk(2)
            hidden = activate(gate, up, weights.activation).to(x.dtype)
            y = _product(hidden, weights.down, weights.down_bias, expert, rounds)
            if adapters is not None:
                y += _delta(hidden, adapters.down, int(adapters.rows.slots[token]), expert)
            out[pair] = pair_weights[pair] * y
    terms = out.view(num_tokens, top_k, -1).transpose(0, 1)
    if shared is None:
        return terms
    gate, up = _of_shared(x, shared.gate_up, adapters, 0).chunk(2, dim=-1)
    hidden = activate(gate, up, shared.activation).to(x.dtype)
    return torch.cat((terms, _of_shared(hidden, shared.down, adapters, 1)[None]))


def _of_shared(
    x: Tensor, weight: ExpertMatrix, adapters: ExpertAdapters | None, product: int
) -> Tensor:
    """One product of a block that all rows go through, with adapters."""
    y = torch.stack([_product(row, weight, None, 0, False) for row in x])
    if adapters is None:
        return y
    assert adapters.shared is not None
    return y + expanded(shrink(x, adapters.shared[product], adapters.rows))


def _product(
    x: Tensor, weight: ExpertMatrix, bias: Tensor | None, expert: int, rounds: bool
) -> Tensor:
    if rounds and not isinstance(weight, Tensor | Mxfp4Matrix):
        x = in_fp8(x[None], Fp8Form(1, weight.group)).plain()[0]
    y = plain(weight[expert], torch.float32).float() @ x.float()
    return y if bias is None else y + bias[expert].float()


def _delta(x: Tensor, site: ExpertSite, slot: int, expert: int) -> Tensor:
    """The addition of a slot's adapter to one expert's product of x."""
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
