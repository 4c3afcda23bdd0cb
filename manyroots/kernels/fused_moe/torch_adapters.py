"""Adapters of experts with torch's operators.

Computes one run of equal adapters after the other and skips experts without pairs in the run. A
matrix that all experts share is applied once per token and never copied. A shared A comes before
tokens are spread over pairs, a shared B after the weighted sum; both are linear, so the result is
the same.

In long runs, the matrices of single experts are multiplied one by one. A decode has about one pair
per expert, where the number of small products costs most. Its matrices are therefore gathered for
one batched product. (Measured with 64 experts, 8 per token, 8 adapters of rank 16 in bfloat16, two
rows each. A layer takes 1.4 times as long as without adapters; one by one 1.9 times.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.fused_moe.adapters import ExpertSite
from manyroots.kernels.fused_moe.torch_pairs import PairsByAdapter, PairsOfRun
from manyroots.kernels.lora_ops.weights import Part


def add_to_pairs(y: Tensor, x: Tensor, site: ExpertSite, pairs: PairsByAdapter) -> None:
    """Add each pair's adapter to y [num_pairs, out] = W x, in place; x is [num_tokens, in]."""
    for of_run, low in pairs.changes(site):
        x_of_run = x[of_run.run.tokens]
        if _is_shared(low.a):
            h = torch.mm(x_of_run, low.a[0].t()).index_select(0, of_run.tokens)
        else:
            by_pair = x_of_run.index_select(0, of_run.tokens)
            h = _product(by_pair, low.a.transpose(1, 2), of_run)
        for part in low.parts:
            _add(y, h, part, of_run)


def combine(y: Tensor, x: Tensor, site: ExpertSite, pairs: PairsByAdapter) -> Tensor:
    """The weighted sum of each token's pairs with their adapters: [num_tokens, out].

    Overwrites y [num_pairs, out] = W x; x is [num_pairs, in].
    """
    behind: list[tuple[slice, Tensor, Part]] = []
    weights = pairs.pairs.routing.weights
    for of_run, low in pairs.changes(site):
        by_pair = x.index_select(0, of_run.places)
        h = _product(by_pair, low.a.transpose(1, 2), of_run)
        for part in low.parts:
            if _is_shared(part.b):
                tokens = of_run.run.tokens
                weighted = h[:, part.ranks][of_run.by_token]
                weighted.mul_(weights[tokens].to(h.dtype).unsqueeze(-1))
                behind.append((tokens, weighted.sum(dim=1), part))
            else:
                _add(y, h, part, of_run)
    out = pairs.pairs.combine(y)
    for tokens, summed, part in behind:
        out[tokens, part.columns].addmm_(summed, part.b[0])
    return out


def _add(y: Tensor, h: Tensor, part: Part, of_run: PairsOfRun) -> None:
    y, h = y[:, part.columns], h[:, part.ranks]
    if _is_shared(part.b) or _is_short(of_run, part.b):
        y.index_add_(0, of_run.places, _product(h, part.b, of_run))
        return
    for segment in of_run.segments:
        y[segment.there].addmm_(h[segment.here], part.b[segment.expert])


def _product(x: Tensor, stack: Tensor, of_run: PairsOfRun) -> Tensor:
    """Each pair's x [pairs of the run, in] times its expert's matrix [experts or 1, in, out]."""
    if _is_shared(stack):
        return torch.mm(x, stack[0])
    if _is_short(of_run, stack):
        return torch.bmm(x.unsqueeze(1), _gathered(stack, of_run.experts)).squeeze(1)
    out = x.new_empty(x.shape[0], stack.shape[2])
    for segment in of_run.segments:
        torch.mm(x[segment.here], stack[segment.expert], out=out[segment.here])
    return out


def _is_short(of_run: PairsOfRun, stack: Tensor) -> bool:
    """True with about one pair per expert; the gathered matrices are then at most as large as the
    stack."""
    return of_run.places.numel() <= stack.shape[0]


def _gathered(stack: Tensor, experts: Tensor) -> Tensor:
    """The matrices of these experts, in the stack's memory order."""
    if stack.is_contiguous():
        return stack.index_select(0, experts)
    return stack.transpose(1, 2).index_select(0, experts).transpose(1, 2)


def _is_shared(stack: Tensor) -> bool:
    return stack.shape[0] == 1
