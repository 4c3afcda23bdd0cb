"""Latent attention with torch's operators; used on every CPU.

Same signatures as `reference.py`. Decoding rows are gathered in groups of similar length. A shorter
row of a group repeats its first token, masked. Only tokens that the row sees are read, so content
after a page's last token does not matter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyroots.kernels.latent.inputs import (
    IndexNorm,
    KeyPiece,
    LatentAdapters,
    LatentNorm,
    SplitKeys,
    as_fp8_rows,
)
from manyroots.kernels.latent.reference import join_keys, latent_read, merge, read_rows
from manyroots.kernels.lora_ops.batch import Run
from manyroots.kernels.norm.torch_ops import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping
from manyroots.kernels.qk_rope_kv_write.torch_ops import RopeRows

__all__ = [
    "absorb_queries",
    "attend_chosen",
    "attend_piece",
    "expand_values",
    "index_write",
    "latent_decode",
    "latent_read",
    "latent_write",
    "merge",
]

MAX_GATHERED = 1 << 22
"""Most numbers that decoding rows gather at once."""
MAX_SCORES = 1 << 22
"""Most scores of a piece's queries at once."""


def latent_write(
    q: Tensor,
    kv: Tensor,
    angles: RopeRows,
    norm: LatentNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
    dtype: torch.dtype | None = None,
    *,
    is_interleaved: bool,
) -> Tensor:
    """Normalise the latents in kv [tokens, latent + rope], rotate the rest, and write both as one
    row into pages [num_pages, page_size, width]. Returns q [tokens, heads, nope + rope] with its
    last part rotated in the same way, in `dtype` (None: unchanged). Partial sums of both have one
    more dimension, the first."""
    dtype = dtype or q.dtype
    q = (q if q.dim() == 3 else q.sum(0)).to(dtype)
    kv = (kv if kv.dim() == 2 else kv.sum(0)).to(dtype)
    latent = norm.weight.shape[0]
    rope = kv.shape[1] - latent
    nope = q.shape[2] - rope
    turned = torch.cat((q[..., nope:], kv[:, None, latent:]), dim=1)
    turned = _rotated(turned, angles, is_interleaved)
    rows = torch.cat((rms_norm(kv[:, :latent], norm.weight, norm.eps), turned[:, -1]), dim=1)
    if pages.dtype is torch.uint8:
        rows = as_fp8_rows(rows, latent)
    at, places = slot_mapping.pages.long(), slot_mapping.offsets.long()
    is_kept = at >= 0
    if not bool(is_kept.all()):
        at, places, rows = at[is_kept], places[is_kept], rows[is_kept]
    pages.index_put_((at, places), rows)
    return torch.cat((q[..., :nope], turned[:, :-1]), dim=2)


def _rotated(x: Tensor, angles: RopeRows, is_interleaved: bool) -> Tensor:
    pairs = angles.sin.shape[-1]
    if pairs == 0:
        return x
    if is_interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :pairs], x[..., pairs:]
    cos, sin = angles.cos[..., :pairs], angles.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def absorb_queries(q: Tensor, weight: Tensor, nope: int, adapters: LatentAdapters | None) -> Tensor:
    """Queries of latents, [tokens, heads, latent + rope], from q [tokens, heads, nope + rope] and
    `kv_b_proj` as weight [heads, nope + v, latent]."""
    by_head = q[..., :nope].transpose(0, 1)
    absorbed = torch.bmm(by_head, weight[:, :nope])
    for run in _runs(adapters):
        low = run.weights.linears.get(adapters.site) if adapters is not None else None
        if low is None:
            continue
        [part] = low.parts
        b = part.b.view(low.rank, weight.shape[0], -1)[..., :nope].permute(1, 2, 0)
        shrunk = torch.bmm(by_head[:, run.tokens], b)
        absorbed[:, run.tokens] += torch.matmul(shrunk, low.a)
    return torch.cat((absorbed.transpose(0, 1), q[..., nope:]), dim=2)


def expand_values(
    attended: Tensor,
    weight: Tensor,
    nope: int,
    adapters: LatentAdapters | None,
    out: Tensor | None = None,
) -> Tensor:
    """Values [tokens, heads, v] of attended latents [tokens, heads, latent], in `out` if given."""
    by_head = attended.transpose(0, 1)
    values = torch.bmm(by_head, weight[:, nope:].transpose(1, 2))
    for run in _runs(adapters):
        low = run.weights.linears.get(adapters.site) if adapters is not None else None
        if low is None:
            continue
        [part] = low.parts
        b = part.b.view(low.rank, weight.shape[0], -1)[..., nope:].transpose(0, 1)
        values[:, run.tokens] += torch.bmm(torch.matmul(by_head[:, run.tokens], low.a.t()), b)
    values = values.transpose(0, 1)
    return values if out is None else out.copy_(values)


def _runs(adapters: LatentAdapters | None) -> tuple[Run, ...]:
    if adapters is None:
        return ()
    assert adapters.rows.batch is not None, "these rows were not prepared by the torch set"
    return adapters.rows.batch.runs


def latent_decode(
    queries: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float, latent: int
) -> Tensor:
    """Attended latents [rows, heads, latent] of queries [rows, heads, latent + rope], each row over
    its first `lengths` tokens. A row without tokens gives zeros."""
    width, page_size = queries.shape[2], pages.shape[1]
    out = queries.new_zeros(*queries.shape[:2], latent)
    lens, order = lengths.sort(descending=True)
    longest = lens.tolist()
    first, count = 0, len(longest) - longest.count(0)
    while first < count:
        last = min(count, first + max(1, MAX_GATHERED // (longest[first] * width)))
        rows, own = order[first:last], lens[first:last, None]
        at = torch.arange(longest[first], device=pages.device)[None]
        is_seen = at < own
        at = torch.where(is_seen, at, 0)
        slots = page_table[rows].gather(1, at // page_size) * page_size + at % page_size
        keys = read_rows(pages, slots.flatten(), latent, width - latent, queries.dtype)
        keys = keys.view(last - first, 1, -1, width)
        mask = is_seen[:, None, None] if longest[first] != longest[last - 1] else None
        attended = F.scaled_dot_product_attention(
            queries[rows][:, None], keys, keys, attn_mask=mask, scale=scale
        )
        out[rows] = attended[:, 0, :, :latent]
        first = last
    return out


def attend_chosen(
    queries: Tensor, pages: Tensor, slots: Tensor, scale: float, latent: int
) -> Tensor:
    """The same, each row over the tokens at its `slots` [rows, most], -1 for none, after all
    others. A row without tokens gives zeros."""
    num_rows, most = slots.shape
    width = queries.shape[2]
    out = queries.new_zeros(*queries.shape[:2], latent)
    if not most:
        return out
    block = max(1, MAX_GATHERED // (most * width))
    for first in range(0, num_rows, block):
        rows = slice(first, min(first + block, num_rows))
        own = slots[rows]
        is_seen = own >= 0
        # A row's first slot stands for those that it lacks: what other pages hold is never read.
        own = torch.where(is_seen, own, own[:, :1].clamp(min=0))
        keys = read_rows(pages, own.flatten(), latent, width - latent, queries.dtype)
        keys = keys.view(len(own), 1, most, width)
        is_some = is_seen.any(1)
        mask = (is_seen | ~is_some[:, None])[:, None, None]
        attended = F.scaled_dot_product_attention(
            queries[rows][:, None], keys, keys, attn_mask=mask, scale=scale
        )
        out[rows] = attended[:, 0, :, :latent].masked_fill(~is_some[:, None, None], 0.0)
    return out


def index_write(
    q: Tensor,
    k: Tensor,
    angles: RopeRows,
    norm: IndexNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
    *,
    is_interleaved: bool,
) -> Tensor:
    """Normalise the index's keys k [tokens, dim], rotate their first part, and write them into
    pages [num_pages, page_size, dim]. Returns q [tokens, heads, dim] with its first part rotated in
    the same way."""
    keys = F.layer_norm(k, k.shape[1:], norm.weight, norm.bias, norm.eps)
    rope = 2 * angles.sin.shape[-1]
    both = torch.cat((q, keys[:, None]), dim=1)
    both = torch.cat((_rotated(both[..., :rope], angles, is_interleaved), both[..., rope:]), dim=2)
    at, places, rows = slot_mapping.pages.long(), slot_mapping.offsets.long(), both[:, -1]
    is_kept = at >= 0
    if not bool(is_kept.all()):
        at, places, rows = at[is_kept], places[is_kept], rows[is_kept]
    pages.index_put_((at, places), rows)
    return both[:, :-1]


def attend_piece(
    q: Tensor, keys: SplitKeys, v: Tensor, piece: KeyPiece, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with queries [tokens, heads, key dim] to a piece of keys and values; also returns
    logarithms of the sums of exponentials. Takes blocks of queries to bound the memory of
    scores."""
    k = join_keys(keys)
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[2])
    out.zero_()
    sums = torch.full(q.shape[:2], -torch.inf, device=q.device)
    query_starts, key_starts = piece.query_starts.tolist(), piece.key_starts.tolist()
    for seq, first_seen in enumerate(piece.first_seen.tolist()):
        begin, end = key_starts[seq : seq + 2]
        if begin == end:
            continue
        first, stop = query_starts[seq : seq + 2]
        block = max(1, MAX_SCORES // ((end - begin) * q.shape[1]))
        for start in range(first, stop, block):
            rows = slice(start, min(start + block, stop))
            num_seen = min(end - begin, first_seen + rows.stop - first)
            if num_seen <= 0:
                continue
            seen_keys = slice(begin, begin + num_seen)
            scores = torch.matmul(q[rows].transpose(0, 1), k[seen_keys].permute(1, 2, 0)).float()
            scores *= scale
            seen = torch.arange(rows.start, rows.stop, device=q.device) - first + first_seen
            hidden = torch.arange(num_seen, device=q.device) > seen[:, None]
            scores.masked_fill_(hidden, -torch.inf)
            total = scores.logsumexp(-1)
            sums[rows] = total.t()
            weights = torch.exp(scores - total.clamp(min=-1e30)[..., None]).to(v.dtype)
            out[rows] = torch.matmul(weights, v[seen_keys].transpose(0, 1)).transpose(0, 1)
    return out, sums
