"""Adapters with torch's operators; used on every CPU.

Same signatures as `reference.py`, for rows from `prepare` of this module and transposed sites. A
run is two products, plus one for each further part. The runs of a group are two batched products in
total: a decode step of a small model has hundreds of sites, and small products cost by their
number. Measured for 4 adapters of rank 16, 8 rows each: 11 ms a step batched, 18 ms one by one, 17
ms as one masked product of all adapters.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.lora_ops.batch import AdapterBatch, AdapterMemory, Group, Slots
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite, LoraRows, LoraTerm
from manyroots.kernels.lora_ops.stacks import Stacked
from manyroots.kernels.lora_ops.weights import LowRank

FEW_TOKENS = 128
"""Up to this many tokens, a product with a transposed factor is written transposed, too. Otherwise
torch on Arm takes another path, which costs 80 us before it computes (16 tokens, 576 to 32: 143 us
instead of 56)."""


def prepare(
    token_slots: Slots, pool: AdapterMemory, device: torch.device, *, all_layers: bool = True
) -> LoraRows | None:
    """A step's adapters, from the slot of each token; None if all tokens use the base model.

    `all_layers`: whether these tokens go through the whole model, or only its head.
    """
    wanted = [slot for slot in np.unique(token_slots).tolist() if slot != NO_ADAPTER]
    weights = {slot: pool.weights(slot) for slot in wanted}
    stacks = pool.stacks if all_layers else None
    batch = AdapterBatch.build(token_slots, weights, stacks, device)
    return None if batch is None else LoraRows.build(token_slots, device, batch=batch)


def add_linear(y: Tensor, x: Tensor, site: LinearSite, rows: LoraRows) -> None:
    """Add each row's adapter to y [num_rows, out] = W x, in place; x is [num_rows, in].

    `shrink` and `expand` in one call, for products that no later kernel completes.
    """
    batch = _batch_of(rows)
    group = batch.group
    if group is not None:
        stacked = group.stack.get(site)
        if stacked is not None:
            _add_group(y, x, stacked, group)
    for run in batch.alone:
        low = run.weights.linears.get(site)
        if low is not None:
            _add(y[run.tokens], _shrunk(x[run.tokens], low), low)


def shrink(x: Tensor, site: LinearSite, rows: LoraRows) -> LoraTerm:
    """x A^T of each row's own adapter, whose B is scaled; the first partial sum holds all of it."""
    hidden = torch.zeros(1, x.shape[0], site.width, device=x.device)
    for run in _batch_of(rows).runs:
        low = run.weights.linears.get(site)
        if low is not None:
            hidden[0, run.tokens, : low.rank] = _shrunk(x[run.tokens], low)
    return LoraTerm(hidden, site, rows)


def expand(y: Tensor, term: LoraTerm) -> None:
    """Add the adapters' part to y [num_rows, sum of part sizes], in place."""
    hidden = term.hidden.sum(0).to(y.dtype)
    for run in _batch_of(term.rows).runs:
        low = run.weights.linears.get(term.site)
        if low is not None:
            _add(y[run.tokens], hidden[run.tokens], low)


def complete(sums: Tensor, term: LoraTerm) -> Tensor:
    """The product [num_rows, n], in the dtype of adapters: partial sums [splits, num_rows, n] added
    up, and the adapters' part."""
    whole = sums.sum(0).to(term.site.pool.dtype)
    expand(whole, term)
    return whole


def add_embedding(y: Tensor, tokens: Tensor, site: EmbeddingSite, rows: LoraRows) -> None:
    """Add B A[token] of each row's own adapter to its vector y [num_rows, hidden]."""
    for run in _batch_of(rows).runs:
        low = run.weights.lookups.get(site)
        if low is not None:
            _add(y[run.tokens], F.embedding(tokens[run.tokens], low.a), low)


def _batch_of(rows: LoraRows) -> AdapterBatch:
    assert rows.batch is not None, "these rows were not prepared by the torch set"
    return rows.batch


def _shrunk(x: Tensor, low: LowRank) -> Tensor:
    """x A^T."""
    if x.shape[0] > FEW_TOKENS:
        return torch.mm(x, low.a.t())
    return torch.mm(x, low.a.t(), out=x.new_empty(low.rank, x.shape[0]).t())


def _add(y: Tensor, h: Tensor, low: LowRank) -> None:
    for part in low.parts:
        y[:, part.columns].addmm_(h[:, part.ranks], part.b)


def _add_group(y: Tensor, x: Tensor, stacked: Stacked, group: Group) -> None:
    num_runs, in_features, _ = stacked.a.shape
    is_even = group.tokens is not None
    cells = x[group.tokens] if is_even else x.index_select(0, group.cells)
    h = torch.bmm(cells.view(num_runs, -1, in_features), stacked.a)
    if is_even:
        own = y[group.tokens].view(num_runs, -1, y.shape[1])
        for part in stacked.parts:
            own[:, :, part.columns].baddbmm_(h[:, :, part.ranks], part.b)
        return
    for part in stacked.parts:
        delta = torch.bmm(h[:, :, part.ranks], part.b).flatten(0, 1)
        y[:, part.columns].index_add_(0, group.rows, delta.index_select(0, group.places))
