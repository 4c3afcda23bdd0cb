"""Adapters with torch's own operators: the path of every CPU.

Same signatures as `reference.py`, of rows that `prepare` made here and of transposed sites. A run
is two products (one more for each further part); the runs of a group are two batched products for
all of them, since a decode step of a small model is hundreds of sites and the cost of small
products is in their number. Measured for 4 adapters of rank 16, 8 rows each: 11 ms a step batched,
18 ms one by one, 17 ms as one product of all adapters with a mask.
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
"""Up to here a product with a transposed factor is written transposed, too: torch on Arm takes
another way for plain ones, which costs 80 us before it computes anything (16 tokens, 576 to 32: 56
us and 143).
"""


def prepare(
    token_slots: Slots, pool: AdapterMemory, device: torch.device, *, all_layers: bool = True
) -> LoraRows | None:
    """A step's adapters from the slot of each of its tokens; None if all are the base model's.

    `all_layers`: whether these tokens pass the whole model, or its head alone.
    """
    wanted = [slot for slot in np.unique(token_slots).tolist() if slot != NO_ADAPTER]
    weights = {slot: pool.weights(slot) for slot in wanted}
    stacks = pool.stacks if all_layers else None
    batch = AdapterBatch.build(token_slots, weights, stacks, device)
    return None if batch is None else LoraRows.build(token_slots, device, batch=batch)


def add_linear(y: Tensor, x: Tensor, site: LinearSite, rows: LoraRows) -> None:
    """Add each row's adapter to y [num_rows, out] = W x, in place; x is [num_rows, in].

    `shrink` and `expand` in one, where nobody finishes a product later.
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
    """x A^T of each row's own adapter, whose B is scaled; all in the first of the partial sums."""
    hidden = torch.zeros(1, x.shape[0], site.width, device=x.device)
    for run in _batch_of(rows).runs:
        low = run.weights.linears.get(site)
        if low is not None:
            hidden[0, run.tokens, : low.rank] = _shrunk(x[run.tokens], low)
    return LoraTerm(hidden, site, rows)


def expand(y: Tensor, term: LoraTerm) -> None:
    """Add what the adapters add onto y [num_rows, sum of part sizes], in place."""
    hidden = term.hidden.sum(0).to(y.dtype)
    for run in _batch_of(term.rows).runs:
        low = run.weights.linears.get(term.site)
        if low is not None:
            _add(y[run.tokens], hidden[run.tokens], low)


def add_embedding(y: Tensor, tokens: Tensor, site: EmbeddingSite, rows: LoraRows) -> None:
    """Add B A[token] of each row's own adapter onto its vector y [num_rows, hidden]."""
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
