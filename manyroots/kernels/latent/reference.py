"""Reference of latent attention: one token and one head at a time, in float32.

Keys and values of a head are products of a token's latent with that head's part of `kv_b_proj`. To
*absorb* that product means to multiply the query with it instead. Queries then attend to latents
directly, and the result is multiplied once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyroots.kernels.latent.inputs import (
    IndexNorm,
    KeyPiece,
    LatentAdapters,
    LatentNorm,
    SplitKeys,
    as_fp8_rows,
    from_fp8_rows,
)
from manyroots.kernels.norm.reference import rms_norm
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping


def latent_write(
    q: Tensor,
    kv: Tensor,
    angles: RopeTable,
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
    more dimension, the first. Other sets may rotate q in place. `is_interleaved`: whether the two
    coordinates of a pair are adjacent in the input; outputs have them in two halves."""
    dtype = dtype or q.dtype
    q = q.float() if q.dim() == 3 else q.float().sum(0)
    kv = kv.float() if kv.dim() == 2 else kv.float().sum(0)
    latent = norm.weight.shape[0]
    rope = kv.shape[1] - latent
    latents = rms_norm(kv[:, :latent], norm.weight.float(), norm.eps)
    rotated = _rotate(kv[:, None, latent:], angles, is_interleaved)[:, 0]
    rows = torch.cat((latents, rotated), dim=1)
    kept = as_fp8_rows(rows, latent) if pages.dtype is torch.uint8 else rows.to(pages.dtype)
    for token, (page, offset) in enumerate(
        zip(slot_mapping.pages.tolist(), slot_mapping.offsets.tolist(), strict=True)
    ):
        if page >= 0:
            pages[page, offset] = kept[token]
    nope = q.shape[2] - rope
    parts = (q[..., :nope], _rotate(q[..., nope:], angles, is_interleaved))
    return torch.cat(parts, dim=2).to(dtype)


def _rotate(x: Tensor, angles: RopeTable, is_interleaved: bool) -> Tensor:
    pairs = angles.cos.shape[1]
    if pairs == 0:
        return x
    if is_interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :pairs], x[..., pairs:]
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def absorb_queries(q: Tensor, weight: Tensor, nope: int, adapters: LatentAdapters | None) -> Tensor:
    """Queries of latents, [tokens, heads, latent + rope], from q [tokens, heads, nope + rope] and
    `kv_b_proj` as weight [heads, nope + v, latent]. The rotated part is unchanged. Adapters add two
    small products per head."""
    tokens = []
    for token, own in enumerate(q.float()):
        pair = _pair(adapters, token, weight)
        heads = []
        for head, query in enumerate(own):
            absorbed = query[:nope] @ weight[head, :nope].float()
            if pair is not None:
                a, b = pair
                absorbed = absorbed + (query[:nope] @ b[head, :nope]) @ a
            heads.append(torch.cat((absorbed, query[nope:])))
        tokens.append(torch.stack(heads))
    return torch.stack(tokens).to(q.dtype)


def expand_values(
    attended: Tensor,
    weight: Tensor,
    nope: int,
    adapters: LatentAdapters | None,
    out: Tensor | None = None,
) -> Tensor:
    """Values [tokens, heads, v] of attended latents [tokens, heads, latent], in `out` if given."""
    tokens = []
    for token, own in enumerate(attended.float()):
        pair = _pair(adapters, token, weight)
        heads = []
        for head, latents in enumerate(own):
            values = weight[head, nope:].float() @ latents
            if pair is not None:
                a, b = pair
                values = values + b[head, nope:] @ (a @ latents)
            heads.append(values)
        tokens.append(torch.stack(heads))
    return _put(torch.stack(tokens).to(attended.dtype), out)


def _put(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)


def _pair(
    adapters: LatentAdapters | None, token: int, weight: Tensor
) -> tuple[Tensor, Tensor] | None:
    """A token's own A [rank, latent] and B [heads, nope + v, rank], scaled; None without an
    adapter."""
    if adapters is None:
        return None
    site, slot = adapters.site, int(adapters.rows.slots[token])
    if slot < 0:
        return None
    num_heads, size, latent = weight.shape
    a_offset, rank, _, _, b_offset = site.table[slot].tolist()
    if rank == 0:
        return None
    a = site.pool[a_offset : a_offset + rank * latent].view(rank, latent).float()
    b = site.b(b_offset, num_heads * size, rank).reshape(num_heads, size, rank).float()
    return a * site.scalings[slot, 0], b


def latent_decode(
    queries: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float, latent: int
) -> Tensor:
    """Attended latents [rows, heads, latent] of queries [rows, heads, latent + rope], each row over
    its first `lengths` tokens. A row without tokens gives zeros. Rows may be tokens of one
    sequence."""
    num_rows, num_heads, width = queries.shape
    out = torch.zeros(num_rows, num_heads, latent, device=queries.device)
    page_size = pages.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        at = torch.arange(length, device=queries.device)
        slots = page_table[row, at // page_size].long() * page_size + at % page_size
        keys = read_rows(pages, slots, latent, width - latent, torch.float32)
        weights = (queries[row].float() @ keys.t() * scale).softmax(-1)
        out[row] = weights @ keys[:, :latent]
    return out.to(queries.dtype)


def attend_chosen(
    queries: Tensor, pages: Tensor, slots: Tensor, scale: float, latent: int
) -> Tensor:
    """The same, each row over the tokens at its `slots` [rows, most], -1 for none, after all
    others. A row without tokens gives zeros."""
    width = queries.shape[2]
    out = torch.zeros(*queries.shape[:2], latent, device=queries.device)
    for row, own in enumerate(slots):
        keys = read_rows(pages, own[own >= 0], latent, width - latent, torch.float32)
        if len(keys):
            weights = (queries[row].float() @ keys.t() * scale).softmax(-1)
            out[row] = weights @ keys[:, :latent]
    return out.to(queries.dtype)


def index_write(
    q: Tensor,
    k: Tensor,
    angles: RopeTable,
    norm: IndexNorm,
    pages: Tensor,
    slot_mapping: SlotMapping,
    *,
    is_interleaved: bool,
) -> Tensor:
    """Normalise the index's keys k [tokens, dim], rotate their first part, and write them into
    pages [num_pages, page_size, dim]. Returns q [tokens, heads, dim] with its first part rotated in
    the same way: outputs have pairs in two halves, as those of `latent_write`."""
    keys = k.float() - k.float().mean(1, keepdim=True)
    keys = keys * torch.rsqrt(keys.square().mean(1, keepdim=True) + norm.eps)
    keys = keys * norm.weight.float() + norm.bias.float()
    rope = 2 * angles.cos.shape[1]
    both = torch.cat((q.float(), keys[:, None]), dim=1)
    rotated = _rotate(both[..., :rope], angles, is_interleaved)
    both = torch.cat((rotated, both[..., rope:]), dim=2)
    for token, (page, offset) in enumerate(
        zip(slot_mapping.pages.tolist(), slot_mapping.offsets.tolist(), strict=True)
    ):
        if page >= 0:
            pages[page, offset] = both[token, -1].to(pages.dtype)
    return both[:, :-1].to(q.dtype)


def latent_read(
    pages: Tensor, slots: Tensor, latent: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The latents [keys, latent] and rotated parts [keys, rope] of tokens at `slots` (page *
    page_size + offset)."""
    rows = read_rows(pages, slots, latent, rope, dtype)
    return rows[:, :latent].contiguous(), rows[:, latent:].contiguous()


def read_rows(pages: Tensor, slots: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Both as rows [keys, latent + rope]."""
    page_size = pages.shape[1]
    found = pages[slots // page_size, slots % page_size]
    if pages.dtype is torch.uint8:
        return from_fp8_rows(found, latent + rope, latent, dtype)
    return found.to(dtype)


def join_keys(keys: SplitKeys) -> Tensor:
    """Keys [keys, heads, nope + rope]."""
    own, shared = keys.own, keys.shared
    return torch.cat((own, shared[:, None].expand(-1, own.shape[1], -1)), dim=2)


def attend_piece(
    q: Tensor, keys: SplitKeys, v: Tensor, piece: KeyPiece, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with queries [tokens, heads, key dim] to a piece of keys and values [keys, heads,
    value dim]. Returns [tokens, heads, value dim], in `out` if given, and logarithms of the sums of
    exponentials, float32 [tokens, heads]. A query that sees no key gives 0 and -inf."""
    k = join_keys(keys)
    attended = torch.zeros(*q.shape[:2], v.shape[2], device=q.device)
    sums = torch.full(q.shape[:2], -torch.inf, device=q.device)
    query_starts, key_starts = piece.query_starts.tolist(), piece.key_starts.tolist()
    for seq, first_seen in enumerate(piece.first_seen.tolist()):
        begin, end = key_starts[seq : seq + 2]
        for place, token in enumerate(range(*query_starts[seq : seq + 2])):
            last = min(begin + first_seen + place + 1, end)
            if last <= begin:
                continue
            for head in range(q.shape[1]):
                scores = k[begin:last, head].float() @ q[token, head].float() * scale
                sums[token, head] = scores.logsumexp(0)
                attended[token, head] = scores.softmax(0) @ v[begin:last, head].float()
    return _put(attended.to(q.dtype), out), sums


def merge(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """The result over both pieces' keys."""
    total = torch.logaddexp(sums, other_sums)
    safe = torch.where(total == -torch.inf, 0.0, total)
    parts = ((out, sums), (other, other_sums))
    weighted = [part.float() * torch.exp(own - safe)[..., None] for part, own in parts]
    return (weighted[0] + weighted[1]).to(out.dtype), total
