"""Reference of paged attention, simple and easy to check; every faster version is compared with it.

Takes one layer's pages, which hold this step's keys and values, and queries; gives the output.
Loops over sequences, reads exactly the tokens that each one sees, and computes in float32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from manyroots.kernels.attention.paged import (
    MAX_RUN,
    DecodeRows,
    PrefillSegments,
    PreparedAttention,
    prepare,
)

__all__ = ["attend", "decode_attention", "prefill_attention", "prepare"]


def attend(
    q: Tensor,
    layer_kv: Tensor,
    metadata: PreparedAttention,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape. `sinks` [heads]
    are scores that take weight and add no value. With a `cap` (0: none), a score s becomes cap *
    tanh(s / cap)."""
    out = torch.zeros_like(q)
    count, window = metadata.num_decodes, metadata.window
    if metadata.decodes is not None:
        out[:count] = decode_attention(
            q[:count], layer_kv, metadata.decodes, scale, window=window, sinks=sinks, cap=cap
        )
    if metadata.prompts is not None:  # each half is zero where the other half has results
        out += prefill_attention(
            q, layer_kv, metadata.prompts, scale, window=window, sinks=sinks, cap=cap
        )
    return out


def _seen_by(layer_kv: Tensor, pages: Tensor, visible: int, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` (0: all) of a sequence's first `visible` keys and values, in order, each
    [num_tokens, kv_heads, head_dim]. Reads only pages that hold some of them."""
    page_size = layer_kv.shape[2]
    first = max(0, visible - window) if window else 0
    first_page = first // page_size
    own = pages[first_page : -(-visible // page_size)]
    seen = slice(first - first_page * page_size, visible - first_page * page_size)
    keys, values = layer_kv[own].unbind(1)
    return keys.flatten(0, 1)[seen], values.flatten(0, 1)[seen]


def _attend_one(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """One query [heads, head_dim]; query head h reads kv head h // (heads / kv_heads)."""
    group = q.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", q.float(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None]), dim=-1)
    weights = scores.softmax(-1)[:, : keys.shape[0]]
    return torch.einsum("ht,thd->hd", weights, values).to(q.dtype)


def _as_shared(rows: DecodeRows, page_size: int) -> Tensor:
    """The page table in which each row's shared entries are replaced by those of its group's first
    member."""
    if rows.shared is None:
        return rows.page_table
    table, members = rows.page_table.clone(), rows.shared.members.long()
    for first, count, num_tokens in rows.shared.blocks.tolist():
        own = members[first : first + count]
        assert (rows.shared.lens[own] == num_tokens).all()
        pages = slice(0, num_tokens // page_size)
        table[own, pages] = table[members[first], pages]
    return table


def _as_runs(rows: DecodeRows, table: Tensor) -> Tensor:
    """The page table in which each row of a run has the entries of the run's first row."""
    if rows.runs is None:
        return table
    count = int(rows.runs.count)
    starts = rows.runs.starts[: count + 1].tolist()
    assert (starts[0], starts[-1]) == (0, len(table)), "every row belongs to a run"
    table = table.clone()
    for first, end in pairwise(starts):
        assert 0 < end - first <= MAX_RUN
        assert (rows.context_lens[first:end].diff() >= 0).all()
        table[first:end] = table[first]
    return table


def decode_attention(
    q: Tensor,
    layer_kv: Tensor,
    rows: DecodeRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """One query per row, q [num_rows, heads, head_dim]. A row sees its last `window` tokens (0:
    all). `sinks` [heads] are scores that take weight and add no value."""
    out = torch.zeros_like(q)
    table = _as_runs(rows, _as_shared(rows, layer_kv.shape[2]))
    for row, context_len in enumerate(rows.context_lens.tolist()):
        if context_len:
            seen = _seen_by(layer_kv, table[row], context_len, window)
            out[row] = _attend_one(q[row], *seen, scale, sinks, cap)
    return out


def prefill_attention(
    q: Tensor,
    layer_kv: Tensor,
    segments: PrefillSegments,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Any number of queries per sequence, q [num_tokens, heads, head_dim]; causal. Queries of no
    sequence give zeros."""
    out = torch.zeros_like(q)
    starts = segments.query_starts.tolist()
    for seq, context_len in enumerate(segments.context_lens.tolist()):
        for token in range(starts[seq], starts[seq + 1]):
            visible = context_len - (starts[seq + 1] - 1 - token)
            seen = _seen_by(layer_kv, segments.page_table[seq], visible, window)
            out[token] = _attend_one(q[token], *seen, scale, sinks, cap)
    return out
