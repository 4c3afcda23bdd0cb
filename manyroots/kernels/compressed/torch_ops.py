"""Attention to a window and to compressed groups, with torch's operators: the path of every CPU.

Same signatures as `reference.py`. Sequences are computed one after the other, queries in blocks so
that scores stay few. Only rows that some query of a block sees are gathered, so what other pages
hold does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.compressed.inputs import GroupPart, KeyRows, RowNorm
from manyroots.kernels.compressed.step import RowsStep, SequenceTokens
from manyroots.kernels.norm.torch_ops import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.kernels.qk_rope_kv_write.torch_ops import RopeRows

MAX_SCORES = 1 << 22
"""Scores that a block of queries has at once."""
MAX_QUERIES = 256
"""Queries of a block: more would multiply with ever more keys outside of their windows."""


def write_rows(rows: Tensor, pages: Tensor, slot_mapping: SlotMapping) -> None:
    """One row for each token into pages [num_pages, page_size, width]; none of padding."""
    at, places = slot_mapping.pages.long(), slot_mapping.offsets.long()
    is_kept = at >= 0
    if not bool(is_kept.all()):
        at, places, rows = at[is_kept], places[is_kept], rows[is_kept]
    pages.index_put_((at, places), rows)


def rotate_last(x: Tensor, angles: RopeRows, *, back: bool) -> Tensor:
    """x [tokens, heads, dim] with the last numbers of each head rotated in neighbouring pairs, or
    rotated back. It may be x itself, changed."""
    return _rotated(x, angles.cos[..., : angles.sin.shape[-1]], angles.sin, back)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    whole = x.shape[-1] - 2 * cos.shape[-1]
    first, second = x[..., whole::2], x[..., whole + 1 :: 2]
    sin = -sin if back else sin
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :whole], pairs.flatten(-2)), dim=-1)


def normed_write(
    q: Tensor,
    kv: Tensor,
    angles: RopeRows,
    norm: RowNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
) -> Tensor:
    """Write kv [tokens, dim] into pages [num_pages, page_size, dim], normalised and rotated.
    Returns q [tokens, heads, dim] with each head normalised, without a weight, and rotated."""
    rows = rms_norm(kv.contiguous(), norm.weight, norm.eps)
    write_rows(rotate_last(rows[:, None], angles, back=False)[:, 0], pages, slot_mapping)
    heads = rms_norm(q.flatten(0, 1), q.new_ones(q.shape[2]), norm.eps)
    return rotate_last(heads.view_as(q), angles, back=False)


def compress(
    pages: Tensor,
    entries: Tensor,
    parts: tuple[GroupPart, ...],
    of_tokens: RowsStep,
    of_entries: RowsStep,
    angles: RopeRows,
) -> None:
    """Write the entries of groups that end in this step. Reads rows of tokens in pages [num_pages,
    page_size, width]; an entry in [num_pages, entries of a page, width] has the vectors of all
    `parts`, each normalised and rotated. `angles`: of the step's tokens, by their groups' first
    positions."""
    size = of_entries.group
    closed = of_tokens.closed(size, size * parts[0].num_series)
    if not len(closed.tokens):
        return
    rows = _at(pages, closed.sources.clamp(min=0))
    is_there = (closed.sources >= 0).unsqueeze(-1)
    cos, sin = angles.cos[closed.tokens, 0], angles.sin[closed.tokens, 0]
    cos = cos[..., : sin.shape[-1]]
    found = [
        _rotated(_means(rows, is_there, part).to(pages.dtype), cos, sin, False) for part in parts
    ]
    to, offsets = of_entries.slot_mapping.pages, of_entries.slot_mapping.offsets
    at = SlotMapping(to[closed.tokens], offsets[closed.tokens] // size)
    write_rows(torch.cat(found, dim=1), entries, at)


def _at(pages: Tensor, rows: Tensor) -> Tensor:
    """Rows of pages, by number. To flatten pages would copy all of them: a layer's are apart."""
    return pages[rows // pages.shape[1], rows % pages.shape[1]]


def _means(rows: Tensor, is_there: Tensor, part: GroupPart) -> Tensor:
    """One vector of each entry [groups, dim], normalised, of rows [groups, span, width]."""
    size, dim, series = part.bias.shape[0], part.dim, part.num_series
    vectors, weights = [], []
    for number in range(series):
        own = rows[:, number * size : (number + 1) * size]
        at = part.first + number * dim
        gate = at + series * dim
        vectors.append(own[..., at : at + dim])
        bias = part.bias[:, number * dim : (number + 1) * dim]
        weights.append(own[..., gate : gate + dim].float() + bias)
    # What is not there must be no number's neighbour: 0 times NaN is NaN.
    numbers = torch.cat(vectors, dim=1).float().masked_fill(~is_there, 0.0)
    shares = torch.cat(weights, dim=1).masked_fill(~is_there, -torch.inf).softmax(1)
    return rms_norm((numbers * shares).sum(1).to(rows.dtype), part.norm, part.eps)


def choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, step: RowsStep, num_chosen: int
) -> Tensor:
    """int64 [tokens, most]: the entries that each query attends to, by number, -1 for none. Scores
    are sums over heads of relu(q k), weighted, with q [tokens, heads, dim] and keys the last `dim`
    numbers of entries. Of equal scores the earlier entry's counts."""
    heads, dim = q.shape[1:]
    most = max((own.context_len // step.group for own in step.sequences), default=0)
    chosen = torch.full((len(q), min(num_chosen, most)), -1)
    for own in step.sequences:
        count = own.context_len // step.group
        if not count:
            continue
        keys = _at(pages, step.rows_of(own.seq, 0, count))[:, -dim:].float()
        for block in own.blocks(max(1, MAX_SCORES // (heads * count))):
            ready = _ready(block, step.group)
            scores = torch.matmul(q[block.tokens].float(), keys.T).relu_()
            total = torch.einsum("tnk,tn->tk", scores, weights[block.tokens].float())
            total.masked_fill_(torch.arange(count) >= ready, -torch.inf)
            # Sorted, not `topk`: that takes any of equals, and what it takes depends on the length.
            best = total.sort(dim=1, descending=True, stable=True).indices[:, :num_chosen]
            best = best.masked_fill(best >= ready, -1)
            chosen[block.tokens, : best.shape[1]] = best
    return chosen


def _ready(block: SequenceTokens, group: int) -> Tensor:
    """[tokens, 1]: how many entries each query of a block sees."""
    return (torch.arange(block.num_before + 1, block.context_len + 1) // group)[:, None]


def attend_rows(
    q: Tensor,
    keys: KeyRows,
    entries: KeyRows | None,
    chosen: Tensor | None,
    sinks: Tensor,
    scale: float,
    angles: RopeRows,
) -> Tensor:
    """What queries [tokens, heads, dim] attend to: keys of their windows, and entries, all or those
    chosen. A row is key and value, so values are rotated; the result is rotated back by each
    query's own `angles`. `sinks` [heads] take weight and give nothing."""
    out = torch.empty_like(q)
    for own in keys.step.sequences:
        count = 0 if entries is None else own.context_len // entries.step.group
        most = max(1, MAX_SCORES // (q.shape[1] * (count + MAX_QUERIES)))
        for block in own.blocks(min(most, MAX_QUERIES)):
            picked = None if chosen is None else chosen[block.tokens]
            queries = q[block.tokens]
            rows, is_seen = _seen(block, keys, entries, picked, q.shape[2])
            scores = torch.matmul(queries, rows.T).mul_(scale).float()
            scores.masked_fill_(~is_seen[:, None], -torch.inf)
            with_sinks = torch.cat(
                (scores, sinks.float()[None, :, None].expand(len(queries), -1, 1)), dim=2
            )
            shares = with_sinks.softmax(2)[..., :-1].to(q.dtype)
            out[block.tokens] = torch.matmul(shares, rows)
    return rotate_last(out, angles, back=True)


def _seen(
    block: SequenceTokens,
    keys: KeyRows,
    entries: KeyRows | None,
    chosen: Tensor | None,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """Rows that some query of a block sees, [rows, dim], and which query sees which."""
    positions = torch.arange(block.num_before, block.context_len)[:, None]
    first = 0 if keys.window is None else max(0, block.num_before + 1 - keys.window)
    at = torch.arange(first, block.context_len)
    is_seen = at <= positions
    if keys.window is not None:
        is_seen &= at > positions - keys.window
    rows = _at(keys.pages, keys.step.rows_of(block.seq, first, block.context_len))
    if entries is None:
        return rows, is_seen
    count = block.context_len // entries.step.group
    is_ready = torch.arange(count) < _ready(block, entries.step.group)
    slots = entries.step.rows_of(block.seq, 0, count)
    if chosen is not None:
        wanted = torch.zeros(len(positions), count + 1, dtype=torch.bool)
        wanted.scatter_(1, torch.where(chosen < 0, count, chosen), True)
        used = wanted[:, :count].any(0).nonzero()[:, 0]
        slots, is_ready = slots[used], wanted[:, used]
    found = _at(entries.pages, slots)[:, :dim]
    return torch.cat((rows, found)), torch.cat((is_seen, is_ready), dim=1)
