"""Attention to a window of tokens and to compressed groups, naive, in float32.

An *entry* is one vector of a complete group of tokens; a query sees entries of groups that end at
its own position or before it. The last numbers of a head are rotated in neighbouring pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm
from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.norm.reference import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping


def write_rows(rows: Tensor, pages: Tensor, slot_mapping: SlotMapping) -> None:
    """One row for each token into pages [num_pages, page_size, width]; none of padding."""
    places = zip(slot_mapping.pages.tolist(), slot_mapping.offsets.tolist(), strict=True)
    for row, (page, offset) in zip(rows, places, strict=True):
        if page >= 0:
            pages[page, offset] = row.to(pages.dtype)


def rotate_last(x: Tensor, angles: RopeTable, *, back: bool) -> Tensor:
    """x [tokens, heads, dim] with the last numbers of each head rotated in neighbouring pairs, or
    rotated back. It may be x itself, changed."""
    return _rotated(x, angles.cos[:, None], angles.sin[:, None], back)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    whole = x.shape[-1] - 2 * cos.shape[-1]
    first, second = x[..., whole::2].float(), x[..., whole + 1 :: 2].float()
    sin = -sin if back else sin
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :whole], pairs.flatten(-2).to(x.dtype)), dim=-1)


def normed_write(
    q: Tensor,
    kv: Tensor,
    angles: RopeTable,
    norm: RowNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
) -> Tensor:
    """Write kv [tokens, dim] into pages [num_pages, page_size, dim], normalised and rotated.
    Returns q [tokens, heads, dim] with each head normalised, without a weight, and rotated."""
    rows = rms_norm(kv.float(), norm.weight.float(), norm.eps)
    write_rows(rotate_last(rows[:, None], angles, back=False)[:, 0], pages, slot_mapping)
    heads = rms_norm(q.float(), torch.ones(q.shape[2], device=q.device), norm.eps)
    return rotate_last(heads, angles, back=False).to(q.dtype)


def compress(
    pages: Tensor,
    entries: Tensor,
    parts: tuple[GroupPart, ...],
    of_tokens: RowsStep,
    of_entries: RowsStep,
    angles: RopeTable,
) -> None:
    """Write the entries of groups that end in this step. Reads rows of tokens in pages [num_pages,
    page_size, width]; an entry in [num_pages, entries of a page, width] has the vectors of all
    `parts`, each normalised and rotated. `angles`: of the step's tokens, by their groups' first
    positions."""
    rows = pages.flatten(0, 1)
    size = of_entries.group
    closed = of_tokens.closed(size, size * parts[0].num_series)
    to = of_entries.slot_mapping
    for token, own in zip(closed.tokens.tolist(), closed.sources.tolist(), strict=True):
        page, offset = int(to.pages[token]), int(to.offsets[token])
        if page < 0:
            continue
        cos, sin = angles.cos[token], angles.sin[token]
        found = [_rotated(_mean(rows, own, part), cos, sin, False) for part in parts]
        entries[page, offset // size] = torch.cat(found).to(entries.dtype)


def _mean(rows: Tensor, slots: list[int], part: GroupPart) -> Tensor:
    """One vector [dim] of an entry, normalised."""
    size, dim, series = part.bias.shape[0], part.dim, part.num_series
    vectors, weights = [], []
    for place, slot in enumerate(slots):
        if slot < 0:
            continue
        begin = place // size * dim
        at = part.first + begin
        gate = at + series * dim
        vectors.append(rows[slot, at : at + dim].float())
        bias = part.bias[place % size, begin : begin + dim]
        weights.append(rows[slot, gate : gate + dim].float() + bias)
    shares = torch.stack(weights).softmax(0)
    mean = (torch.stack(vectors) * shares).sum(0, keepdim=True)
    return rms_norm(mean, part.norm.float(), part.eps)[0]


def choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, num_chosen: int
) -> Tensor:
    """int64 [tokens, most]: the entries that each query attends to, by number in any order, then -1
    for none. Scores are sums over heads of relu(q k), weighted, with q [tokens, heads, dim] and
    keys the last `dim` numbers of entries. Of equal scores the earlier entry's counts."""
    dim, rows = q.shape[2], pages.flatten(0, 1)
    most = max((own.context_len // step.group for own in step.sequences), default=0)
    chosen = torch.full((len(q), min(num_chosen, most)), -1, device=q.device)
    for own in step.sequences:
        keys = rows[step.rows_of(own.seq, 0, own.context_len // step.group)][:, -dim:].float()
        for place, token in enumerate(range(own.tokens.start, own.tokens.stop)):
            ready = (own.num_before + place + 1) // step.group
            scores = (q[token].float() @ keys[:ready].T).relu()
            total = (scores * weights[token].float()[:, None]).sum(0)
            best = total.sort(descending=True, stable=True).indices[:num_chosen]
            chosen[token, : len(best)] = best
    return chosen


def attend_rows(
    q: Tensor,
    keys: KeyRows,
    entries: KeyRows | None,
    chosen: Tensor | None,
    sinks: Tensor,
    scale: float,
    angles: RopeTable,
) -> Tensor:
    """What queries [tokens, heads, dim] attend to: keys of their windows, and entries, all or those
    chosen. A row is key and value, so values are rotated; the result is rotated back by each
    query's own `angles`. `sinks` [heads] take weight and give nothing."""
    out = torch.empty_like(q)
    dim = q.shape[2]
    for own in keys.step.sequences:
        for place, token in enumerate(range(own.tokens.start, own.tokens.stop)):
            position = own.num_before + place
            first = 0 if keys.window is None else max(0, position + 1 - keys.window)
            slots = keys.step.rows_of(own.seq, first, position + 1)
            seen = [keys.pages.flatten(0, 1)[slots]]
            if entries is not None:
                ready = (position + 1) // entries.step.group
                slots = entries.step.rows_of(own.seq, 0, ready)
                if chosen is not None:
                    slots = slots[chosen[token][chosen[token] >= 0]]
                seen.append(entries.pages.flatten(0, 1)[slots][:, :dim])
            rows = torch.cat(seen).float()
            scores = torch.cat((q[token].float() @ rows.T * scale, sinks.float()[:, None]), dim=1)
            out[token] = (scores.softmax(1)[:, :-1] @ rows).to(q.dtype)
    return rotate_last(out, angles, back=True)
