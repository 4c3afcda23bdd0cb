"""Paged attention with torch's operators; used on every CPU.

Same signatures as `reference.py`. Gathers the pages of a group of sequences and passes them to
torch's fused attention. The query heads that share a kv head become further queries of that head.
Measured on a CPU, decoding takes half the time of `enable_gqa`, and prefill the same.

Whole pages are read and their tails masked. This is exact only if the tails are finite.
`qk_rope_kv_write` therefore clears a page when it writes its first token. A sequence with NaNs can
spoil its own output, but not that of the next owner of its pages. With a window, pages that no
query of a group sees are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyroots.kernels.attention.causal import block_size, causal_bias
from manyroots.kernels.attention.groups import DecodeGroup, GroupedRows, PrefillGroup, group_rows
from manyroots.kernels.attention.paged import AttentionMetadata
from manyroots.kernels.scratch import scratch

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What `F.scaled_dot_product_attention` calls on a CPU; it also returns the sums of
exponentials."""


class _Scores(NamedTuple):
    """The change of query-key products before softmax."""

    scale: float
    cap: float

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the logarithms of the sums of exponentials."""
        if not self.cap:
            attended, sums = _fused(q, keys, values, attn_mask=bias, scale=self.scale)
            return attended, sums
        # The library has no operator with a cap.
        scores = torch.matmul(q, keys.transpose(-1, -2)).float() * (self.scale / self.cap)
        scores = torch.tanh(scores) * self.cap
        if bias is not None:
            scores = scores + bias
        sums = scores.logsumexp(-1)
        weights = torch.exp(scores - sums.unsqueeze(-1)).to(q.dtype)
        return torch.matmul(weights, values), sums


def prepare(rows: AttentionMetadata, page_size: int, dtype: torch.dtype) -> GroupedRows:
    """Prepare what no layer changes, once per family and step."""
    return group_rows(rows, page_size, dtype)


def attend(
    q: Tensor,
    layer_kv: Tensor,
    metadata: GroupedRows,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attend: q [num_tokens, heads, head_dim] over the pages, to the same shape. `sinks` [heads]
    are scores that take weight and add no value. With a `cap` (0: none), a score s becomes cap *
    tanh(s / cap)."""
    by_kv_head = None if sinks is None else sinks.float().view(layer_kv.shape[-2], -1)
    scores = _Scores(scale, cap)
    count = metadata.num_decodes
    if not metadata.prefill_groups and count == len(q):
        return _decode(q, layer_kv, metadata, scores, by_kv_head)
    out = torch.empty_like(q)
    if count:
        out[:count] = _decode(q[:count], layer_kv, metadata, scores, by_kv_head)
    for group in metadata.prefill_groups:
        at = group.tokens
        _prefill(q[at], layer_kv, group, metadata.window, scores, by_kv_head, out[at])
    return out


def _decode(
    q: Tensor, layer_kv: Tensor, rows: GroupedRows, scores: _Scores, sinks: Tensor | None
) -> Tensor:
    order = rows.decode_order
    sorted_q = q if order is None else q.index_select(0, order)
    pieces = [
        _decode_group(sorted_q[group.rows], layer_kv, group, scores, sinks)
        for group in rows.decode_groups
    ]
    if order is None and len(pieces) == 1:
        return pieces[0]
    if order is None:
        return torch.cat(pieces)
    # Padding rows see nothing.
    out = torch.empty_like(q) if len(order) == len(q) else torch.zeros_like(q)
    return out.index_copy_(0, order, torch.cat(pieces)) if pieces else out


def _decode_group(
    q: Tensor, layer_kv: Tensor, group: DecodeGroup, scores: _Scores, sinks: Tensor | None
) -> Tensor:
    heads_as_queries = q.view(len(q), layer_kv.shape[-2], -1, q.shape[-1])
    if group.shared_pages.numel():
        attended = _decode_sharing(heads_as_queries, layer_kv, group, scores, sinks)
    else:
        keys, values = _gather(layer_kv, group.pages, len(q), q.dtype)
        attended = _attended(heads_as_queries, keys, values, group.bias, scores, sinks)
    return attended.reshape(q.shape).to(q.dtype)  # float32 if there are sinks


def _decode_sharing(
    q: Tensor, layer_kv: Tensor, group: DecodeGroup, scores: _Scores, sinks: Tensor | None
) -> Tensor:
    """Attend to a common prefix once for all of its rows, to the rest row by row, and merge.

    A prefix is gathered once instead of once per row, and its queries make one matrix product.
    Softmax over both parts is the parts' own outputs, weighted by their sums of exponentials.
    """
    rows, kv_heads, per_head, head_dim = q.shape
    count = group.num_prefixes
    keys, values = _gather(layer_kv, group.shared_pages, count, q.dtype)
    cells = q if group.cells is None else q.index_select(0, group.cells)
    by_prefix = cells.view(count, -1, kv_heads, per_head, head_dim).transpose(1, 2)
    together = by_prefix.reshape(count, kv_heads, -1, head_dim)
    common, common_sums = scores.attend(together, keys, values)
    keys, values = _gather(layer_kv, group.pages, rows, q.dtype)
    own, own_sums = scores.attend(q, keys, values, group.bias)
    common = common.reshape(by_prefix.shape).transpose(1, 2).flatten(0, 1)
    common_sums = common_sums.reshape(by_prefix.shape[:-1]).transpose(1, 2).flatten(0, 1)
    if group.places is not None:
        common = common.index_select(0, group.places)
        common_sums = common_sums.index_select(0, group.places)
    share = torch.sigmoid(common_sums - own_sums).unsqueeze(-1).to(q.dtype)
    merged = torch.lerp(own, common, share)
    if sinks is None:
        return merged
    return _beside_sinks(merged, torch.logaddexp(common_sums, own_sums), sinks)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scores: _Scores, sinks: Tensor | None
) -> Tensor:
    """q [seqs, kv_heads, queries, head_dim]; `sinks` [kv_heads, queries], or one value for all
    seqs."""
    attended, sums = scores.attend(q, keys, values, bias)
    return attended if sinks is None else _beside_sinks(attended, sums, sinks)


def _beside_sinks(attended: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """The attention output reduced by the weight that the sinks take, in float32. `sums` are
    logarithms of the keys' sums of exponentials."""
    return attended * torch.sigmoid(sums - sinks).unsqueeze(-1)


def _prefill(
    q: Tensor,
    layer_kv: Tensor,
    group: PrefillGroup,
    window: int,
    scores: _Scores,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    page_size, kv_heads, head_dim = layer_kv.shape[-3:]
    keys, values = _gather(layer_kv, group.pages, group.num_seqs, q.dtype)
    grouped = (group.num_seqs, group.num_queries, kv_heads, -1, head_dim)
    q, out = q.view(grouped), out.view(grouped)
    num_cached = group.context_len - group.num_queries
    block = block_size(group.context_len, window)
    for first in range(0, group.num_queries, block):
        last = min(first + block, group.num_queries)
        visible = num_cached + last
        num_keys = -(-visible // page_size) * page_size
        seen_from = max(0, num_cached + first + 1 - window) if window else 0
        bias = causal_bias(
            last - first, visible - seen_from, num_keys - seen_from, q.shape[3], q.dtype, q.device,
            window,
        )  # fmt: skip
        # [seqs, queries, kv_heads, group, dim] -> [seqs, kv_heads, queries * group, dim]
        attended = _attended(
            q[:, first:last].transpose(1, 2).flatten(2, 3),
            keys[:, :, seen_from:num_keys],
            values[:, :, seen_from:num_keys],
            bias,
            scores,
            None if sinks is None else sinks.repeat(1, last - first),
        )
        by_query = attended.view(group.num_seqs, kv_heads, last - first, -1, head_dim)
        out[:, first:last] = by_query.transpose(1, 2)


def _gather(
    layer_kv: Tensor, pages: Tensor, num_seqs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of whole pages, each [num_seqs, kv_heads, num_keys, head_dim]."""
    kept = layer_kv.dtype
    if kept is not dtype:  # FP8, which few operators support
        layer_kv = layer_kv.view(torch.uint8)
    page_size, kv_heads, head_dim = layer_kv.shape[-3:]
    shape = (pages.shape[0], page_size, kv_heads, head_dim)
    gathered = []
    for part, name in enumerate(("keys", "values")):
        buffer = scratch(name, shape, layer_kv.dtype, layer_kv.device)
        torch.index_select(layer_kv[:, part], 0, pages, out=buffer)
        if kept is not dtype:
            buffer = buffer.view(kept).to(dtype)
        gathered.append(buffer.view(num_seqs, -1, kv_heads, head_dim).transpose(1, 2))
    return gathered[0], gathered[1]
