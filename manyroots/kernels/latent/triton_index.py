"""Keys and queries of an index of tokens in Triton: normalise, rotate and write to pages.

Same signature as `reference.py`. One launch: a program has a token's key, or some heads of its
query. Outputs have pairs in two halves, as those of `triton_rows.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.latent.inputs import IndexNorm
from manyroots.kernels.latent.triton_rows import padded, rotated_pairs
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping

HEADS = 8
"""Heads of a query per program."""


@triton.jit
def _write_key(
    k, weight, bias, cos, sin, pages, page_of, offset_of, token, eps, k_row, page_stride,
    token_stride, DIM: tl.constexpr, DIM_POW: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_POW: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    page = tl.load(page_of + token).to(tl.int64)
    if page < 0:
        return
    to = pages + page * page_stride + tl.load(offset_of + token).to(tl.int64) * token_stride
    source = k + token.to(tl.int64) * k_row
    d = tl.arange(0, DIM_POW)
    x = tl.load(source + d, mask=d < DIM, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / DIM
    x = tl.where(d < DIM, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / DIM + eps)
    is_plain = (d >= 2 * PAIRS) & (d < DIM)
    w = tl.load(weight + d, mask=is_plain, other=0.0).to(tl.float32)
    b = tl.load(bias + d, mask=is_plain, other=0.0).to(tl.float32)
    tl.store(to + d, x * factor * w + b, mask=is_plain)
    if PAIRS:
        e = tl.arange(0, PAIRS_POW)
        is_pair = e < PAIRS
        if INTERLEAVED:
            first, second = 2 * e, 2 * e + 1
        else:
            first, second = e, e + PAIRS
        one = (tl.load(source + first, mask=is_pair, other=0.0).to(tl.float32) - mean) * factor
        two = (tl.load(source + second, mask=is_pair, other=0.0).to(tl.float32) - mean) * factor
        one = one * tl.load(weight + first, mask=is_pair, other=0.0).to(tl.float32)
        two = two * tl.load(weight + second, mask=is_pair, other=0.0).to(tl.float32)
        one += tl.load(bias + first, mask=is_pair, other=0.0).to(tl.float32)
        two += tl.load(bias + second, mask=is_pair, other=0.0).to(tl.float32)
        c = tl.load(cos + token * PAIRS + e, mask=is_pair, other=0.0)
        s = tl.load(sin + token * PAIRS + e, mask=is_pair, other=0.0)
        tl.store(to + e, one * c - two * s, mask=is_pair)
        tl.store(to + PAIRS + e, two * c + one * s, mask=is_pair)


@triton.jit
def _index_write(
    q, k, cos, sin, weight, bias, pages, page_of, offset_of, out, eps, q_row, q_head, k_row,
    page_stride, token_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_POW: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    if tl.program_id(0) == 0:
        _write_key(
            k, weight, bias, cos, sin, pages, page_of, offset_of, token, eps, k_row, page_stride,
            token_stride, DIM, DIM_POW, PAIRS, PAIRS_POW, INTERLEAVED,
        )  # fmt: skip
    else:
        head = (tl.program_id(0) - 1) * HEADS + tl.arange(0, HEADS)
        is_head = (head < NUM_HEADS)[:, None]
        source = q + token.to(tl.int64) * q_row + head * q_head
        to = out + (token.to(tl.int64) * NUM_HEADS + head) * DIM
        d = tl.arange(0, DIM_POW)
        is_plain = is_head & ((d >= 2 * PAIRS) & (d < DIM))[None, :]
        x = tl.load(source[:, None] + d[None, :], mask=is_plain, other=0.0)
        tl.store(to[:, None] + d[None, :], x, mask=is_plain)
        if PAIRS:
            e = tl.arange(0, PAIRS_POW)
            is_pair = is_head & (e < PAIRS)[None, :]
            a, b = rotated_pairs(source, 0, e, is_pair, cos, sin, token, 1, PAIRS, INTERLEAVED)
            tl.store(to[:, None] + e[None, :], a, mask=is_pair)
            tl.store(to[:, None] + PAIRS + e[None, :], b, mask=is_pair)


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
    the same way."""
    num_tokens, heads, dim = q.shape
    pairs = angles.cos.shape[1]
    out = torch.empty(num_tokens, heads, dim, dtype=q.dtype, device=q.device)
    _index_write[(1 + -(-heads // HEADS), num_tokens)](
        q, k, angles.cos, angles.sin, norm.weight, norm.bias, pages, slot_mapping.pages,
        slot_mapping.offsets, out, norm.eps, *q.stride()[:2], k.stride(0), *pages.stride()[:2],
        NUM_HEADS=heads, DIM=dim, DIM_POW=padded(dim), PAIRS=pairs, PAIRS_POW=padded(pairs),
        HEADS=HEADS, INTERLEAVED=is_interleaved, num_warps=2, **launch_options(q.device),
    )  # fmt: skip
    return out
