"""A token's row of latents in Triton: normalise, rotate and write it to its page, and read it back.

Same signatures as `reference.py`. One launch does everything between the two products of a layer
and attention. A program has a token's latent, or some heads of its query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels import scaled
from manyroots.kernels.latent.inputs import LatentNorm, SplitKeys
from manyroots.kernels.launch import as_splits, launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping

LARGEST = tl.constexpr(scaled.LARGEST)
HEADS = 8
"""Heads of a query per program."""
READ = 8
"""Rows of a program that reads."""
JOINED = 32
"""Keys of a program that joins their two parts."""


def padded(size: int, least: int = 1) -> int:
    """The next power of two, as tiles require."""
    return 1 << (max(size, least) - 1).bit_length()


def numbers_of(pages: Tensor) -> tuple[Tensor, Tensor, int]:
    """A page's numbers and its scales as separate tensors, and the offset of a row's scales."""
    if pages.dtype is not torch.uint8:
        return pages, pages, 0
    return pages.view(torch.float8_e4m3fn), pages.view(torch.float32), pages.shape[2] // 4 - 4


@triton.jit
def _added_up(at, ok, split, NUM_SPLITS: tl.constexpr):
    """The sum of a product's partial sums at `at`, in float32."""
    total = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    for number in tl.static_range(1, NUM_SPLITS):
        total += tl.load(at + number * split, mask=ok, other=0.0).to(tl.float32)
    return total


@triton.jit
def rotated_pairs(
    source, split, d, is_number, cos, sin, token,
    NUM_SPLITS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both halves of the rotated numbers at `source` (some rows of pointers)."""
    if INTERLEAVED:
        first, second = 2 * d, 2 * d + 1
    else:
        first, second = d, d + PAIRS
    a = _added_up(source[:, None] + first[None, :], is_number, split, NUM_SPLITS)
    b = _added_up(source[:, None] + second[None, :], is_number, split, NUM_SPLITS)
    c = tl.load(cos + token * PAIRS + d, mask=d < PAIRS, other=0.0)[None, :]
    s = tl.load(sin + token * PAIRS + d, mask=d < PAIRS, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def _scale_for(largest, LARGEST: tl.constexpr):
    return tl.maximum(largest, 1e-12) / LARGEST


@triton.jit
def _as_fp8(x, scale, LARGEST: tl.constexpr):
    return tl.clamp(x / scale, -LARGEST, LARGEST, tl.PropagateNan.ALL)


@triton.jit
def _write(
    kv, weight, cos, sin, pages, scales, page_of, offset_of, token, eps, kv_split, kv_row,
    page_stride, token_stride, scale_start, KV_SPLITS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_POW: tl.constexpr, ROPE_POW: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr, INTERLEAVED: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Write a token's row into its page."""
    page = tl.load(page_of + token).to(tl.int64)
    if page < 0:
        return
    at = page * page_stride + tl.load(offset_of + token).to(tl.int64) * token_stride
    source = kv + token.to(tl.int64) * kv_row
    d = tl.arange(0, LATENT_POW)
    x = _added_up(source + d, d < LATENT, kv_split, KV_SPLITS)
    w = tl.load(weight + d, mask=d < LATENT, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps) * w
    if IS_FP8:
        scale = _scale_for(tl.max(tl.abs(x), axis=0), LARGEST)
        tl.store(scales + at // 4 + scale_start, scale)
        x = _as_fp8(x, scale, LARGEST)
    tl.store(pages + at + d, x.to(pages.dtype.element_ty), mask=d < LATENT)
    to = pages + at + LATENT
    if PAIRS:
        e = tl.arange(0, PAIRS_POW)
        begin = tl.arange(0, 1) + LATENT
        a, b = rotated_pairs(
            source + begin, kv_split, e, (e < PAIRS)[None, :], cos, sin, token, KV_SPLITS, PAIRS,
            INTERLEAVED,
        )  # fmt: skip
        if IS_FP8:
            scale = _scale_for(tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b))), LARGEST)
            tl.store(scales + at // 4 + scale_start + 1, scale)
            a, b = _as_fp8(a, scale, LARGEST), _as_fp8(b, scale, LARGEST)
        is_pair = (e < PAIRS)[None, :]
        tl.store(to + e[None, :], a.to(pages.dtype.element_ty), mask=is_pair)
        tl.store(to + PAIRS + e[None, :], b.to(pages.dtype.element_ty), mask=is_pair)
    elif ROPE:
        f = tl.arange(0, ROPE_POW)
        y = _added_up(source + LATENT + f, f < ROPE, kv_split, KV_SPLITS)
        if IS_FP8:
            scale = _scale_for(tl.max(tl.abs(y), axis=0), LARGEST)
            tl.store(scales + at // 4 + scale_start + 1, scale)
            y = _as_fp8(y, scale, LARGEST)
        tl.store(to + f, y.to(pages.dtype.element_ty), mask=f < ROPE)


@triton.jit
def _rope_write(
    q, kv, cos, sin, weight, pages, scales, page_of, offset_of, out, eps, q_split, q_row, q_head,
    kv_split, kv_row, out_row, page_stride, token_stride, scale_start,
    Q_SPLITS: tl.constexpr, KV_SPLITS: tl.constexpr, IN_PLACE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    PLAIN: tl.constexpr, PLAIN_POW: tl.constexpr, LATENT_POW: tl.constexpr,
    ROPE_POW: tl.constexpr, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IS_FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    if tl.program_id(0) == 0:
        _write(
            kv, weight, cos, sin, pages, scales, page_of, offset_of, token, eps, kv_split, kv_row,
            page_stride, token_stride, scale_start, KV_SPLITS, LATENT, ROPE, LATENT_POW, ROPE_POW,
            PAIRS, PAIRS_POW, INTERLEAVED, IS_FP8,
        )  # fmt: skip
    else:
        head = (tl.program_id(0) - 1) * HEADS + tl.arange(0, HEADS)
        is_head = (head < NUM_HEADS)[:, None]
        source = q + token.to(tl.int64) * q_row + head * q_head
        to = out + token.to(tl.int64) * out_row + head * (NOPE + ROPE)
        if not IN_PLACE:
            d = tl.arange(0, PLAIN_POW)
            is_plain = is_head & (d < PLAIN)[None, :]
            x = _added_up(source[:, None] + d[None, :], is_plain, q_split, Q_SPLITS)
            tl.store(to[:, None] + d[None, :], x, mask=is_plain)
        if PAIRS:
            e = tl.arange(0, PAIRS_POW)
            is_pair = is_head & (e < PAIRS)[None, :]
            a, b = rotated_pairs(
                source + NOPE, q_split, e, is_pair, cos, sin, token, Q_SPLITS, PAIRS, INTERLEAVED
            )
            if IN_PLACE:
                tl.debug_barrier()  # every thread has read
            tl.store(to[:, None] + NOPE + e[None, :], a, mask=is_pair)
            tl.store(to[:, None] + NOPE + PAIRS + e[None, :], b, mask=is_pair)


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
    more dimension, the first. Rotates in place where that suffices."""
    dtype = dtype or q.dtype
    whole = q
    q = q if q.dim() == 4 else q[None]
    kv = as_splits(kv)
    num_tokens, heads, size = q.shape[1:]
    latent = norm.weight.shape[0]
    rope = kv.shape[2] - latent
    pairs = angles.cos.shape[1]
    is_in_place = whole.dim() == 3 and whole.dtype == dtype and whole.stride()[1:] == (size, 1)
    out = whole
    if not is_in_place:
        out = torch.empty(num_tokens, heads, size, dtype=dtype, device=q.device)
    numbers, scales, scale_start = numbers_of(pages)
    plain = size - rope if pairs else size
    _rope_write[(1 + -(-heads // HEADS), num_tokens)](
        q, kv, angles.cos, angles.sin, norm.weight, numbers, scales, slot_mapping.pages,
        slot_mapping.offsets, out, norm.eps, *q.stride()[:3], *kv.stride()[:2], out.stride(0),
        *pages.stride()[:2], scale_start, Q_SPLITS=q.shape[0], KV_SPLITS=kv.shape[0],
        IN_PLACE=is_in_place,
        NUM_HEADS=heads, NOPE=size - rope, LATENT=latent, ROPE=rope, PLAIN=plain,
        PLAIN_POW=padded(plain), LATENT_POW=padded(latent), ROPE_POW=padded(rope), PAIRS=pairs,
        PAIRS_POW=padded(pairs), HEADS=HEADS, INTERLEAVED=is_interleaved,
        IS_FP8=pages.dtype is torch.uint8, num_warps=2, **launch_options(q.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _read(
    pages, scales, slots, latents, rotated, num_rows, page_stride, token_stride, scale_start,
    PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_POW: tl.constexpr,
    ROWS: tl.constexpr, IS_FP8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < num_rows
    slot = tl.load(slots + row, mask=ok, other=0).to(tl.int64)
    at = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * token_stride
    d = tl.arange(0, WIDTH_POW)
    is_number = ok[:, None] & (d < WIDTH)[None, :]
    x = tl.load(pages + at[:, None] + d[None, :], mask=is_number, other=0.0)
    if IS_FP8:
        scale_at = at // 4 + scale_start
        first = tl.load(scales + scale_at, mask=ok, other=0.0)[:, None]
        second = tl.load(scales + scale_at + 1, mask=ok, other=0.0)[:, None]
        x = x.to(tl.float32) * tl.where((d < LATENT)[None, :], first, second)
    x = x.to(latents.dtype.element_ty)
    to = row[:, None] * LATENT + d[None, :]
    tl.store(latents + to, x, mask=is_number & (d < LATENT)[None, :])
    to = row[:, None] * (WIDTH - LATENT) + (d - LATENT)[None, :]
    tl.store(rotated + to, x, mask=is_number & (d >= LATENT)[None, :])


def latent_read(
    pages: Tensor, slots: Tensor, latent: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The latents [keys, latent] and rotated parts [keys, rope] of tokens at `slots` (page *
    page_size + offset)."""
    width = latent + rope
    latents, rotated = (
        torch.empty(slots.shape[0], size, dtype=dtype, device=pages.device)
        for size in (latent, rope)
    )
    if slots.shape[0] == 0:
        return latents, rotated
    numbers, scales, scale_start = numbers_of(pages)
    _read[(-(-slots.shape[0] // READ),)](
        numbers, scales, slots, latents, rotated, slots.shape[0], *pages.stride()[:2], scale_start,
        PAGE_SIZE=pages.shape[1], LATENT=latent, WIDTH=width, WIDTH_POW=padded(width), ROWS=READ,
        IS_FP8=pages.dtype is torch.uint8, **launch_options(pages.device),
    )  # fmt: skip
    return latents, rotated


@triton.jit(do_not_specialize=["num_keys"])
def _join(
    own, shared, out, num_keys, own_row, own_head, shared_row,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, NOPE_POW: tl.constexpr,
    ROPE_POW: tl.constexpr, KEYS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    head = tl.program_id(0)
    key = tl.program_id(1).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    is_key = (key < num_keys)[:, None]
    to = out + (key * NUM_HEADS + head)[:, None] * (NOPE + ROPE)
    d = tl.arange(0, NOPE_POW)[None, :]
    is_own = is_key & (d < NOPE)
    x = tl.load(own + key[:, None] * own_row + head * own_head + d, mask=is_own, other=0.0)
    tl.store(to + d, x, mask=is_own)
    if ROPE:
        e = tl.arange(0, ROPE_POW)[None, :]
        is_shared = is_key & (e < ROPE)
        y = tl.load(shared + key[:, None] * shared_row + e, mask=is_shared, other=0.0)
        tl.store(to + NOPE + e, y, mask=is_shared)


def join_keys(keys: SplitKeys) -> Tensor:
    """Keys [keys, heads, nope + rope]."""
    own, shared = keys.own, keys.shared
    num_keys, heads, nope = own.shape
    rope = shared.shape[1]
    out = torch.empty(num_keys, heads, nope + rope, dtype=own.dtype, device=own.device)
    if num_keys:
        _join[(heads, -(-num_keys // JOINED))](
            own, shared, out, num_keys, *own.stride()[:2], shared.stride(0), NUM_HEADS=heads,
            NOPE=nope, ROPE=rope, NOPE_POW=padded(nope), ROPE_POW=padded(rope), KEYS=JOINED,
            **launch_options(own.device),
        )  # fmt: skip
    return out
