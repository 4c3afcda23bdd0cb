"""Rows of tokens and entries of groups in Triton: normalise, rotate, compress and write to pages.

Same signatures as `reference.py`. No kernel asks which groups end in a step: each token's program
sees by the token's position whether its group does. So a decode step can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.compressed.inputs import GroupPart, RowNorm
from manyroots.kernels.compressed.step import RowsStep
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable, SlotMapping

HEADS = 4
"""Heads of a query per program."""
HEADS_ROTATED = 64
"""The same where nothing but the rotated part is read."""
ROWS = 8
"""Tokens of a group in one iteration."""
COPIED = 1024
"""Numbers of a row that a program copies."""


@triton.jit
def _rotated_last(
    x, cos, sin, token, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_POW: tl.constexpr,
    PAIRS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """x [ROWS, DIM_POW] of one token, with the last pairs of the first DIM numbers rotated."""
    first, second = tl.split(tl.reshape(x, (ROWS, DIM_POW // 2, 2)))
    place = tl.arange(0, DIM_POW // 2) - (DIM // 2 - PAIRS)
    is_pair = (place >= 0) & (place < PAIRS)
    c = tl.load(cos + token * PAIRS + place, mask=is_pair, other=1.0)[None, :]
    s = tl.load(sin + token * PAIRS + place, mask=is_pair, other=0.0)[None, :]
    if BACK:
        s = -s
    both = tl.join(first * c - second * s, second * c + first * s)
    return tl.reshape(both, (ROWS, DIM_POW))


@triton.jit
def _pairs(
    x, factor, cos, sin, token, ok, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr
):  # fmt: skip
    """Pairs of numbers that lie at pointers `x` [rows], times `factor` [rows, 1], rotated. Returns
    them as two tensors, where the first lie, and which there are."""
    place = tl.arange(0, PAIRS_POW)
    is_pair = place < PAIRS
    c = tl.load(cos + token * PAIRS + place, mask=is_pair, other=1.0)[None, :]
    s = tl.load(sin + token * PAIRS + place, mask=is_pair, other=0.0)[None, :]
    at, ok = x[:, None] + 2 * place[None, :], ok[:, None] & is_pair[None, :]
    first = tl.load(at, mask=ok, other=0.0).to(tl.float32) * factor
    second = tl.load(at + 1, mask=ok, other=0.0).to(tl.float32) * factor
    return first * c - second * s, second * c + first * s, 2 * place[None, :], ok


@triton.jit
def _rotate(
    x, cos, sin, x_row, x_head,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, PAIRS_POW: tl.constexpr,
    HEADS: tl.constexpr, BACK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    n = tl.arange(0, 2 * PAIRS_POW)
    own = x + token.to(tl.int64) * x_row + head * x_head + DIM - 2 * PAIRS
    at = own[:, None] + n[None, :]
    ok = (head < NUM_HEADS)[:, None] & (n < 2 * PAIRS)[None, :]
    # Pairs are loaded whole, so they are registers of one thread.
    both = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    both = _rotated_last(both, cos, sin, token, HEADS, 2 * PAIRS, 2 * PAIRS_POW, PAIRS, BACK)
    tl.store(at, both.to(x.dtype.element_ty), mask=ok)


def rotate_last(x: Tensor, angles: RopeTable, *, back: bool) -> Tensor:
    """x [tokens, heads, dim] with the last numbers of each head rotated in neighbouring pairs, or
    rotated back: x itself, changed."""
    tokens, heads, dim = x.shape
    pairs, block = angles.cos.shape[1], min(HEADS_ROTATED, padded(heads))
    _rotate[(-(-heads // block), tokens)](
        x, angles.cos, angles.sin, *x.stride()[:2], NUM_HEADS=heads, DIM=dim, PAIRS=pairs,
        PAIRS_POW=padded(pairs), HEADS=block, BACK=back, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return x


@triton.jit
def _normed_write(
    q, kv, cos, sin, weight, pages, page_of, offset_of, out, eps, q_row, q_head, kv_row,
    page_stride, token_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_POW: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_POW: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    d = tl.arange(0, DIM_POW)
    if tl.program_id(0) == 0:
        page = tl.load(page_of + token).to(tl.int64)
        if page >= 0:
            ok = (d < DIM)[None, :]
            x = tl.load(kv + token.to(tl.int64) * kv_row + d[None, :], mask=ok, other=0.0)
            x = x.to(tl.float32)
            w = tl.load(weight + d[None, :], mask=ok, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps) * w
            x = _rotated_last(x, cos, sin, token, 1, DIM, DIM_POW, PAIRS, False)
            to = pages + page * page_stride
            to += tl.load(offset_of + token).to(tl.int64) * token_stride
            tl.store(to + d[None, :], x.to(pages.dtype.element_ty), mask=ok)
    else:
        head = (tl.program_id(0) - 1) * HEADS + tl.arange(0, HEADS)
        ok = (head < NUM_HEADS)[:, None] & (d < DIM)[None, :]
        source = q + token.to(tl.int64) * q_row + head * q_head
        x = tl.load(source[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        to = out + (token.to(tl.int64) * NUM_HEADS + head) * DIM
        whole: tl.constexpr = DIM - 2 * PAIRS
        ok = ok & (d < whole)[None, :]
        tl.store(to[:, None] + d[None, :], (x * factor).to(out.dtype.element_ty), mask=ok)
        # Read again, from the cache: pairs of a row would have to change places among threads.
        first, second, at, ok = _pairs(
            source + whole, factor, cos, sin, token, head < NUM_HEADS, PAIRS, PAIRS_POW
        )
        to = to[:, None] + whole + at
        tl.store(to, first.to(out.dtype.element_ty), mask=ok)
        tl.store(to + 1, second.to(out.dtype.element_ty), mask=ok)


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
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    pairs = angles.cos.shape[1]
    _normed_write[(1 + -(-heads // HEADS), tokens)](
        q, kv, angles.cos, angles.sin, norm.weight, pages, slot_mapping.pages,
        slot_mapping.offsets, out, norm.eps, *q.stride()[:2], kv.stride(0), *pages.stride()[:2],
        NUM_HEADS=heads, DIM=dim, DIM_POW=padded(dim), PAIRS=pairs, PAIRS_POW=padded(pairs),
        HEADS=HEADS, num_warps=4, **launch_options(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _copy(
    rows, pages, page_of, offset_of, rows_row, page_stride, token_stride,
    WIDTH: tl.constexpr, COPIED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    token = tl.program_id(1)
    page = tl.load(page_of + token).to(tl.int64)
    offset = tl.load(offset_of + token).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    if page >= 0:
        d = tl.program_id(0) * COPIED + tl.arange(0, COPIED)
        x = tl.load(rows + token.to(tl.int64) * rows_row + d, mask=d < WIDTH, other=0.0)
        to = pages + page * page_stride + offset * token_stride
        tl.store(to + d, x.to(pages.dtype.element_ty), mask=d < WIDTH)


def write_rows(rows: Tensor, pages: Tensor, slot_mapping: SlotMapping) -> None:
    """One row for each token into pages [num_pages, page_size, width]; none of padding."""
    tokens, width = rows.shape
    _copy[(-(-width // COPIED), tokens)](
        rows, pages, slot_mapping.pages, slot_mapping.offsets, rows.stride(0), *pages.stride()[:2],
        WIDTH=width, COPIED=COPIED, num_warps=4, **launch_options(rows.device),
    )  # fmt: skip


@triton.jit
def _compress(
    pages, entries, bias, norm, cos, sin, page_table, seqs, lens, page_of, offset_of, eps, first,
    to_first, table_row, page_stride, token_stride, entry_page, entry_stride,
    PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr, SERIES: tl.constexpr, DIM: tl.constexpr,
    DIM_POW: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One vector of the entry of the group that ends with a token, if one does. The softmax over
    tokens is computed for each number apart."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0)
    to_page = tl.load(page_of + token).to(tl.int64)
    length = tl.load(lens + token)
    if to_page >= 0 and length % SIZE == 0 and length > 0:
        table = page_table + tl.load(seqs + token) * table_row
        d = tl.arange(0, DIM_POW)
        is_number = (d < DIM)[None, :]
        best = tl.full((DIM_POW,), float("-inf"), tl.float32)
        total = tl.zeros((DIM_POW,), tl.float32)
        acc = tl.zeros((DIM_POW,), tl.float32)
        # The last tokens first: those before a sequence's begin come in the last iterations, and
        # the first one has a weight to begin with.
        for begin in range(0, SIZE * SERIES, ROWS):
            place = SIZE * SERIES - 1 - begin - tl.arange(0, ROWS)
            position = length - SIZE * SERIES + place
            ok = (place >= 0) & (position >= 0)
            page = tl.load(table + position // PAGE_SIZE, mask=ok, other=0).to(tl.int64)
            row = pages + page * page_stride + (position % PAGE_SIZE).to(tl.int64) * token_stride
            series = place // SIZE
            at = (row + first + series * DIM)[:, None] + d[None, :]
            seen = ok[:, None] & is_number
            x = tl.load(at, mask=seen, other=0.0).to(tl.float32)
            weight = tl.load(at + SERIES * DIM, mask=seen, other=0.0).to(tl.float32)
            bias_at = bias + (place % SIZE) * (SERIES * DIM) + series * DIM
            weight += tl.load(bias_at[:, None] + d[None, :], mask=seen, other=0.0)
            weight = tl.where(ok[:, None], weight, float("-inf"))
            higher = tl.maximum(best, tl.max(weight, axis=0))
            share = tl.exp(weight - higher[None, :])
            shrink = tl.exp(best - higher)
            total = total * shrink + tl.sum(share, axis=0)
            acc = acc * shrink + tl.sum(share * x, axis=0)
            best = higher
        mean = tl.where(d < DIM, acc / total, 0.0)
        w = tl.load(norm + d, mask=d < DIM, other=0.0).to(tl.float32)
        mean = mean * tl.rsqrt(tl.sum(mean * mean, axis=0) / DIM + eps) * w
        out = _rotated_last(mean[None, :], cos, sin, token, 1, DIM, DIM_POW, PAIRS, False)
        offset = tl.load(offset_of + token).to(tl.int64) // SIZE
        to = entries + to_page * entry_page + offset * entry_stride + to_first
        tl.store(to + d[None, :], out.to(entries.dtype.element_ty), mask=is_number)


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
    table, to = of_tokens.page_table, of_entries.slot_mapping
    seqs, lens = of_tokens.token_seqs, of_tokens.token_lens
    to_first = 0
    for part in parts:
        _compress[(lens.shape[0],)](
            pages, entries, part.bias, part.norm, angles.cos, angles.sin, table, seqs, lens,
            to.pages, to.offsets, part.eps, part.first, to_first, table.stride(0),
            *pages.stride()[:2], *entries.stride()[:2], PAGE_SIZE=of_tokens.page_size,
            SIZE=of_entries.group, SERIES=part.num_series, DIM=part.dim, DIM_POW=padded(part.dim),
            PAIRS=angles.cos.shape[1], ROWS=min(ROWS, padded(of_entries.group)), num_warps=4,
            **launch_options(pages.device),
        )  # fmt: skip
        to_first += part.dim
