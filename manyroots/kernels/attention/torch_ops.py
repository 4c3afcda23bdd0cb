"""Paged attention with torch's own operators: the path of every CPU and, for now, of CUDA.

Same signatures as `reference.py`. Gathers the pages of a group of sequences and hands them to
torch's fused attention. The query heads that share a kv head are laid out as further queries of
that head (measured on a CPU: half the time of `enable_gqa` for decoding, the same for prefill).

Whole pages are read and their tails masked. That is exact only if what lies there is finite, so
`write_kv` clears a page when its first token is written: a sequence that went to NaN can spoil
its own output, never that of the next owner of its pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.attention.batch import AttentionBatch, DecodeGroup, PrefillGroup
from manyroots.kernels.attention.causal import block_size, causal_bias
from manyroots.kernels.scratch import scratch


def write_kv(layer_kv: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
    """Put each token's keys and values, [num_tokens, kv_heads, head_dim], into its slot."""
    if batch.new_pages.numel():
        layer_kv.index_fill_(0, batch.new_pages, 0)
    slots = (batch.slot_pages, batch.slot_offsets)
    layer_kv[:, 0].index_put_(slots, k)
    layer_kv[:, 1].index_put_(slots, v)


def paged_attention(q: Tensor, layer_kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape."""
    out = torch.empty_like(q)
    if batch.num_decodes:
        _decode(q[: batch.num_decodes], layer_kv, batch, scale, out[: batch.num_decodes])
    for group in batch.prefill_groups:
        _prefill(q[group.tokens], layer_kv, group, scale, out[group.tokens])
    return out


def _decode(q: Tensor, layer_kv: Tensor, batch: AttentionBatch, scale: float, out: Tensor) -> None:
    order = batch.decode_order
    sorted_q = q if order is None else q.index_select(0, order)
    sorted_out = out if order is None else torch.empty_like(out)
    kv_heads, head_dim = layer_kv.shape[-2:]
    for group in batch.decode_groups:
        num_rows = group.rows.stop - group.rows.start
        heads_as_queries = sorted_q[group.rows].view(num_rows, kv_heads, -1, head_dim)
        if group.shared_pages.numel():
            attended = _decode_sharing(heads_as_queries, layer_kv, group, scale)
        else:
            keys, values = _gather(layer_kv, group.pages, num_rows)
            attended = F.scaled_dot_product_attention(
                heads_as_queries, keys, values, attn_mask=group.bias, scale=scale
            )
        sorted_out[group.rows] = attended.reshape(num_rows, -1, head_dim)
    if order is not None:
        out.index_copy_(0, order, sorted_out)


def _decode_sharing(q: Tensor, layer_kv: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """Attend to a common prefix once for all rows, to the rest row by row, and merge.

    The prefix is gathered once instead of once per row, and its queries make one matrix product.
    Softmax over both parts is the parts' own outputs, weighted by their sums of exponentials.
    """
    rows, kv_heads, per_head, head_dim = q.shape
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    keys, values = _gather(layer_kv, group.shared_pages, 1)
    together = q.transpose(0, 1).reshape(1, kv_heads, rows * per_head, head_dim)
    common, common_sums = attend(together, keys, values, scale=scale)
    keys, values = _gather(layer_kv, group.pages, rows)
    own, own_sums = attend(q, keys, values, attn_mask=group.bias, scale=scale)
    common = common.reshape(kv_heads, rows, per_head, head_dim).transpose(0, 1)
    common_sums = common_sums.reshape(kv_heads, rows, per_head).transpose(0, 1)
    share = torch.sigmoid(common_sums - own_sums).unsqueeze(-1).to(q.dtype)
    return torch.lerp(own, common, share)


def _prefill(q: Tensor, layer_kv: Tensor, group: PrefillGroup, scale: float, out: Tensor) -> None:
    page_size, kv_heads, head_dim = layer_kv.shape[-3:]
    keys, values = _gather(layer_kv, group.pages, group.num_seqs)
    grouped = (group.num_seqs, group.num_queries, kv_heads, -1, head_dim)
    q, out = q.view(grouped), out.view(grouped)
    num_cached = group.context_len - group.num_queries
    block = block_size(group.context_len)
    for first in range(0, group.num_queries, block):
        last = min(first + block, group.num_queries)
        visible = num_cached + last
        num_keys = -(-visible // page_size) * page_size
        bias = causal_bias(last - first, visible, num_keys, q.shape[3], q.dtype, q.device)
        # [seqs, queries, kv_heads, group, dim] -> [seqs, kv_heads, queries * group, dim]
        heads_as_queries = q[:, first:last].transpose(1, 2).flatten(2, 3)
        attended = F.scaled_dot_product_attention(
            heads_as_queries,
            keys[:, :, :num_keys],
            values[:, :, :num_keys],
            attn_mask=bias,
            scale=scale,
        )
        by_query = attended.view(group.num_seqs, kv_heads, last - first, -1, head_dim)
        out[:, first:last] = by_query.transpose(1, 2)


def _gather(layer_kv: Tensor, pages: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Keys and values of whole pages, each [num_seqs, kv_heads, num_keys, head_dim]."""
    page_size, kv_heads, head_dim = layer_kv.shape[-3:]
    shape = (pages.shape[0], page_size, kv_heads, head_dim)
    gathered = []
    for part, name in enumerate(("keys", "values")):
        buffer = scratch(name, shape, layer_kv.dtype, layer_kv.device)
        torch.index_select(layer_kv[:, part], 0, pages, out=buffer)
        gathered.append(buffer.view(num_seqs, -1, kv_heads, head_dim).transpose(1, 2))
    return gathered[0], gathered[1]
