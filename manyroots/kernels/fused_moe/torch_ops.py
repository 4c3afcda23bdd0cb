"""Mixture of experts with torch's operators; used on every CPU.

Same signatures as `reference.py`. One matrix product per expert that has tokens, over all of its
tokens at once; an expert without tokens is not touched. The loop over experts is on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.activation.torch_ops import activate
from manyroots.kernels.fused_moe.adapters import ExpertAdapters
from manyroots.kernels.fused_moe.reference import within_groups
from manyroots.kernels.fused_moe.routing import (
    LEAST_SUM,
    ExpertGroups,
    Routing,
    Scoring,
    weights_by_expert,
)
from manyroots.kernels.fused_moe.torch_adapters import add_to_pairs, combine
from manyroots.kernels.fused_moe.torch_pairs import PairsByAdapter, SortedPairs
from manyroots.kernels.fused_moe.weights import ExpertMatrix, ExpertWeights
from manyroots.kernels.lora_ops.sites import LoraTerm
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
    """Choose experts from a router's scores [tokens, experts], which include the adapters'
    additions, and the router's bias [experts]. All weights are multiplied with `factor`. `groups`:
    restricts a token's experts to a few groups. `chosen` [tokens, top_k]: the experts, where a
    table gives them.

    Probabilities are float32 for any dtype of the scores: in half precision experts would tie.
    """
    assert lora is None, "products of this set are finished"
    total = scores.float()
    if bias is not None and not scoring.is_by_expert:
        total = total + bias
    if scoring.is_by_expert:
        own = weights_by_expert(total, scoring)
        if chosen is None:
            choice = own if bias is None else own + bias
            _, chosen = _largest(within_groups(choice, groups, by_best_two=True), top_k)
        weights = own.gather(1, chosen)
    elif scoring is Scoring.SOFTMAX_OF_CHOSEN:
        best, chosen = _largest(total, top_k)
        weights = torch.softmax(best, dim=-1)
    else:
        likely = within_groups(torch.softmax(total, dim=-1), groups, by_best_two=False)
        weights, chosen = _largest(likely, top_k)
    if scoring.is_renormalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    if factor != 1.0:
        weights = weights * factor
    experts = chosen.int()
    pairs, lists = _sorted(experts.numpy().reshape(-1), scores.shape[1])
    return Routing(weights, torch.from_numpy(pairs), torch.from_numpy(lists), experts)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ties go to the lower index, as in the other sets; `topk` may return any."""
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :count], places[:, :count]


def _sorted(expert_of_pair: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """`pairs` and `groups` of a `Routing`."""
    # torch sorts 16-bit integers by counting.
    pairs = expert_of_pair.astype(np.int16).argsort(kind="stable").astype(np.int32)
    counts = np.bincount(expert_of_pair, minlength=num_experts)
    used = counts.nonzero()[0]
    groups = np.empty((len(used), 3), np.int32)
    groups[:, 0] = used
    groups[:, 2] = ends = counts[used].cumsum()
    groups[:, 1] = ends - counts[used]
    return pairs, groups


MOST_JOINED_TOKENS = 0
"""On a CPU a shared block's own products are as fast."""


def experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    adapters: ExpertAdapters | None = None,
    shared: ExpertWeights | None = None,
) -> Tensor:
    """Each token's complete output: [tokens, hidden] in the dtype of x."""
    if shared is not None:
        raise ValueError("a shared block is computed apart on a CPU")
    pairs = SortedPairs.of(routing)
    of_adapters = None if adapters is None else _adapter_pairs(pairs, adapters)
    by_pair = x.index_select(0, pairs.tokens)
    gate_up = _products(by_pair, weights.gate_up, weights.gate_up_bias, pairs)
    if adapters is not None and of_adapters is not None:
        add_to_pairs(gate_up, x, adapters.gate_up, of_adapters)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = activate(gate, up, weights.activation)
    out = _products(inner, weights.down, weights.down_bias, pairs)
    if adapters is None or of_adapters is None:
        return pairs.combine(out)
    return combine(out, inner, adapters.down, of_adapters)


def _adapter_pairs(pairs: SortedPairs, adapters: ExpertAdapters) -> PairsByAdapter:
    batch = adapters.rows.batch
    assert batch is not None, "these rows were not prepared by the torch set"
    return PairsByAdapter(pairs, batch)


def _products(x: Tensor, weight: ExpertMatrix, bias: Tensor | None, pairs: SortedPairs) -> Tensor:
    """Each pair's x [num_pairs, in] times its expert's weight [num_experts, out, in]."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, own in pairs.segments:
        one = plain(weight[expert], x.dtype).t()
        if bias is None:
            torch.mm(x[own], one, out=out[own])
        else:
            torch.addmm(bias[expert], x[own], one, out=out[own])
    return out
