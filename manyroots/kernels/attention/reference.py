"""Paged attention, naive and obviously right: what every faster version is compared with.

Takes one layer's pages and this step's queries, keys and values; gives the attention output.
Loops over sequences, reads exactly the tokens each one sees, and computes in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.attention.batch import AttentionBatch


def write_kv(layer_kv: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
    """Put each token's keys and values, [num_tokens, kv_heads, head_dim], into its slot."""
    slots = zip(batch.slot_pages.tolist(), batch.slot_offsets.tolist(), strict=True)
    for token, (page, offset) in enumerate(slots):
        layer_kv[page, 0, offset] = k[token]
        layer_kv[page, 1, offset] = v[token]


def paged_attention(q: Tensor, layer_kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape."""
    out = torch.empty_like(q)
    for seq, context_len in enumerate(batch.context_lens):
        first, last = batch.query_starts[seq], batch.query_starts[seq + 1]
        keys, values = _tokens_of(layer_kv, batch.page_table[seq], context_len)
        for token in range(first, last):
            # The last query sees the whole context, the one before it one key less, and so on.
            visible = context_len - (last - 1 - token)
            out[token] = _attend_one(q[token], keys[:visible], values[:visible], scale)
    return out


def _tokens_of(layer_kv: Tensor, pages: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one sequence in order, each [context_len, kv_heads, head_dim]."""
    keys, values = layer_kv[pages].unbind(1)
    return keys.flatten(0, 1)[:context_len], values.flatten(0, 1)[:context_len]


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query [heads, head_dim]; query head h reads kv head h // (heads / kv_heads)."""
    group = q.shape[0] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", q.float(), keys) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values).to(q.dtype)
