"""Reference of adapters: one row and one part at a time, in float32.

Simple and slow. Every other file of this folder that computes has the same signatures and is
compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.ids import NO_ADAPTER
from manyroots.kernels.lora_ops.batch import AdapterMemory, Slots
from manyroots.kernels.lora_ops.sites import EmbeddingSite, LinearSite, LoraRows, LoraTerm


def prepare(
    token_slots: Slots, pool: AdapterMemory, device: torch.device, *, all_layers: bool = True
) -> LoraRows | None:
    """A step's adapters, from the slot of each token; None if all tokens use the base model.

    `all_layers`: whether these tokens go through the whole model, or only its head.
    """
    if (token_slots == NO_ADAPTER).all():
        return None
    return LoraRows.build(token_slots, device)


def shrink(x: Tensor, site: LinearSite, rows: LoraRows) -> LoraTerm:
    """scaling * x A^T of each row's own adapter."""
    hidden = torch.zeros(1, x.shape[0], site.width, device=x.device)
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        a_offset, total, *parts = site.table[slot].tolist()
        a = site.pool[a_offset : a_offset + total * x.shape[1]].view(total, x.shape[1])
        for part in range(site.num_parts):
            start, rank, _ = parts[3 * part : 3 * part + 3]
            hidden[0, row, start : start + rank] = site.scalings[slot, part] * (
                a[start : start + rank].float() @ x[row].float()
            )
    return LoraTerm(hidden, site, rows)


def expanded(term: LoraTerm) -> Tensor:
    """The adapters' additions, float32 [num_rows, sum of part sizes]."""
    site = term.site
    hidden = term.hidden.sum(0).to(site.pool.dtype).float()
    out = torch.zeros(hidden.shape[0], sum(site.part_sizes), device=hidden.device)
    for row, slot in enumerate(term.rows.slots.tolist()):
        if slot < 0:
            continue
        parts = site.table[slot].tolist()[2:]
        column = 0
        for part, size in enumerate(site.part_sizes):
            start, rank, offset = parts[3 * part : 3 * part + 3]
            b = site.b(offset, size, rank)
            out[row, column : column + size] = b.float() @ hidden[row, start : start + rank]
            column += size
    return out


def expand(y: Tensor, term: LoraTerm) -> None:
    """Add the adapters' part to y [num_rows, sum of part sizes], in place."""
    y.copy_(y.float() + expanded(term))


def complete(sums: Tensor, term: LoraTerm) -> Tensor:
    """The product [num_rows, n], in the dtype of adapters: partial sums [splits, num_rows, n] added
    up, and the adapters' part."""
    whole = sums.float().sum(0)
    expand(whole, term)
    return whole.to(term.site.pool.dtype)


def add_embedding(y: Tensor, tokens: Tensor, site: EmbeddingSite, rows: LoraRows) -> None:
    """Add scaling * B A[token] of each row's own adapter to its vector y [num_rows, hidden]."""
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        a_offset, rank, b_offset = site.table[slot].tolist()
        at = a_offset + int(tokens[row]) * rank
        hidden = site.pool[at : at + rank].float()
        delta = site.b(b_offset, y.shape[1], rank).float() @ hidden
        y[row] = y[row].float() + site.scalings[slot, 0] * delta
