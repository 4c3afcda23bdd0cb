"""Residual add, an adapter's expand and RMS normalisation in one kernel.

Same signatures as `reference.py`. One multiprocessor can read a row alone, so there is one program
per row, one launch and no second trip to memory. An adapter's B is too much for one multiprocessor
to read and multiply while all others wait. With adapters, and if only one product reads the rows, a
program has a piece of the rows and leaves the division to that product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fp8_rows import ROW_GROUP, Fp8Form, Fp8Rows, run_length, tries_scales
from manyroots.kernels.launch import (
    as_splits,
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.lora_ops.sites import LoraTerm
from manyroots.kernels.lora_ops.triton import (
    block_at,
    early_ranks,
    expand_tile,
    has_few_ranks,
    part_of,
    rank_constants,
    shrunk,
)
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.kernels.triton_fp8_rows import (
    empty_rows,
    in_fp8,
    scaled_groups,
    scaled_row,
    store_parts,
)

PIECE = ROW_GROUP
"""Columns of a program that has a piece of its rows."""
PIECE_REGISTERS = 128
"""Most registers of a thread if a program has several rows: four such programs fit on a
multiprocessor instead of three."""


@triton.jit
def _ranks(b, rank, first, cols, col_ok, RANKS: tl.constexpr):
    """Columns [first, first + RANKS) of B, [n, RANKS]; zero past the rank."""
    r = first + tl.arange(0, RANKS)
    ok = col_ok[:, None] & (r < rank)[None, :]
    return tl.load(b + cols[:, None] * rank + r[None, :], mask=ok, other=0.0)


@triton.jit
def _row_expand(
    total, weight, hidden, hidden_split, row, hidden_row, first, rank,
    NUM_SPLITS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """total + weight hidden[row], where weight has the ranks from `first` on."""
    r = first + tl.arange(0, RANKS)
    at = hidden + row * hidden_row + r
    h = tl.load(at, mask=r < rank, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        h += tl.load(at + split * hidden_split, mask=r < rank, other=0.0)
    h = h.to(weight.dtype).to(tl.float32)
    return total + tl.sum(weight.to(tl.float32) * h[None, :], axis=1)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    residual, delta, also, weight, post, out, data, scales, slots, hidden, pool, table, num_rows, n,
    eps, factor, delta_split, delta_row, also_split, also_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, ALSO: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, RANKS: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_OUT: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    ok = cols < n
    scale = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    if HAS_POST:
        post_scale = tl.load(post + cols, mask=ok, other=0.0).to(tl.float32)
    if HIDDEN_SPLITS:
        slot = tl.load(slots + row)
        entry = table + tl.maximum(slot, 0) * 5
        rank = tl.load(entry + 3).to(tl.int32)
        rank = tl.multiple_of(tl.where(slot >= 0, rank, 0), 8)
        b = pool + tl.multiple_of(tl.load(entry + 4), 8)
        # B is in the cache, and its first ranks in registers, before the product is done.
        for at in range(0, n * rank, 512 * 64):
            line = at + tl.arange(0, 512) * 64
            prefetch(b + tl.minimum(line, n * rank - 1), DEPENDENT)
        first_ranks = _ranks(b, rank, 0, cols, ok, RANKS)
    wait_for_inputs(DEPENDENT)
    before = tl.load(residual + row * n + cols, mask=ok, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32) if HAS_POST or HAS_FACTOR else before
    for split in tl.static_range(NUM_SPLITS):
        at = delta + split * delta_split + row * delta_row + cols
        total += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(ALSO):
        at = also + split * also_split + row * also_row + cols
        total += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    if HIDDEN_SPLITS:
        if rank > 0:
            total = _row_expand(
                total, first_ranks, hidden, hidden_split, row, hidden_row, 0, rank,
                HIDDEN_SPLITS, RANKS,
            )  # fmt: skip
            for first in range(RANKS, rank, RANKS):
                total = _row_expand(
                    total, _ranks(b, rank, first, cols, ok, RANKS), hidden, hidden_split, row,
                    hidden_row, first, rank, HIDDEN_SPLITS, RANKS,
                )  # fmt: skip
    if HAS_POST:
        total *= tl.rsqrt(tl.sum(total * total) / n + eps) * post_scale
    if HAS_POST or HAS_FACTOR:
        total = before + total * factor
    if NUM_SPLITS:
        tl.store(residual + row * n + cols, total, mask=ok)
    inverse = tl.rsqrt(tl.sum(total * total) / n + eps)
    normed = (total * inverse * scale).to(residual.dtype.element_ty)
    if HAS_OUT:
        tl.store(out + row * n + cols, normed, mask=ok)
    if PARTS:
        part_stride = num_rows.to(tl.int64) * n
        to = data + row * n + cols
        if RUN:
            scaled, of_row = scaled_row(normed.to(tl.float32), RUN)
            store_parts(to, part_stride, scaled, ok, PARTS)
            tl.store(scales + row, of_row)
        else:
            groups: tl.constexpr = BLOCK // GROUP
            values = tl.reshape(normed.to(tl.float32), (groups, GROUP))
            scaled, of_groups = scaled_groups(values, 1)
            store_parts(to, part_stride, tl.reshape(scaled, (BLOCK,)), ok, PARTS)
            group = tl.arange(0, groups)
            tl.store(scales + group * num_rows + row, of_groups, mask=group * GROUP < n)


@triton.jit
def _piece_of_rows(
    residual, delta, also, scale, out, squares, data, scales, hidden, b, start, rank, first_ranks,
    first, count, begin, cols, num_rows, n, delta_split, delta_row, also_split, also_row,
    hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, ALSO: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
):  # fmt: skip
    """Compute the columns `cols` of `count` rows from `begin` on that use one adapter."""
    piece = tl.program_id(0)
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None] & (cols < n)[None, :]
    at = rows[:, None] * n + cols[None, :]
    total = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        added = delta + split * delta_split + rows[:, None] * delta_row + cols[None, :]
        total += tl.load(added, mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(ALSO):
        added = also + split * also_split + rows[:, None] * also_row + cols[None, :]
        total += tl.load(added, mask=ok, other=0.0).to(tl.float32)
    first_hidden = shrunk(
        0, start, rank, hidden, hidden_split, hidden_row, rows, r < count, b, HIDDEN_SPLITS,
        RANK_BLOCK,
    )  # fmt: skip
    total = expand_tile(
        total, first_hidden, first_ranks, b, start, rank, tl.minimum(cols, n - 1), hidden,
        hidden_split, hidden_row, rows, r < count, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
    )  # fmt: skip
    total = tl.where(ok, total, 0.0)
    tl.store(residual + at, total, mask=ok)
    normed = (total * scale).to(residual.dtype.element_ty)
    tl.store(out + at, normed, mask=ok)
    if PARTS:
        scaled, of_groups = scaled_groups(normed.to(tl.float32), 1)
        store_parts(data + at, num_rows.to(tl.int64) * n, scaled, ok, PARTS)
        tl.store(scales + piece * num_rows + rows, of_groups, mask=r < count)
    of_rows = squares + rows * tl.num_programs(0) + piece
    tl.store(of_rows, tl.sum(total * total, axis=1), mask=r < count)


@triton.jit
def _piece_of_block(
    residual, delta, also, scale, out, squares, data, scales, hidden, pool, table, first, count,
    slot, cols, num_rows, n, delta_split, delta_row, also_split, also_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, ALSO: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The columns `cols` of a block."""
    start, rank, b = part_of(pool, table, slot, 0, 1)
    first_ranks = early_ranks(b, rank, tl.minimum(cols, n - 1), RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if count == 1:
        _piece_of_rows(
            residual, delta, also, scale, out, squares, data, scales, hidden, b, start, rank,
            first_ranks, first, 1, 0, cols, num_rows, n, delta_split, delta_row, also_split,
            also_row, hidden_split, hidden_row, NUM_SPLITS, ALSO, HIDDEN_SPLITS, PARTS, 1,
            RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
    elif BLOCK_R > 1:
        for begin in range(0, count, BLOCK_R):
            _piece_of_rows(
                residual, delta, also, scale, out, squares, data, scales, hidden, b, start, rank,
                first_ranks, first, count, begin, cols, num_rows, n, delta_split, delta_row,
                also_split, also_row, hidden_split, hidden_row, NUM_SPLITS, ALSO, HIDDEN_SPLITS,
                PARTS, BLOCK_R, RANK_BLOCK, MAX_RANK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_piece(
    residual, delta, also, weight, out, squares, data, scales, hidden, pool, table, slots, blocks,
    num_blocks, num_rows, n, delta_split, delta_row, also_split, also_row, hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, ALSO: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr,
    MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = tl.load(weight + tl.minimum(cols, n - 1)[None, :]).to(tl.float32)
    if BLOCK_R == 1:
        row = tl.program_id(1)
        _piece_of_block(
            residual, delta, also, scale, out, squares, data, scales, hidden, pool, table, row, 1,
            tl.load(slots + row), cols, num_rows, n, delta_split, delta_row, also_split, also_row,
            hidden_split, hidden_row, NUM_SPLITS, ALSO, HIDDEN_SPLITS, PARTS, BLOCK_R, RANK_BLOCK,
            MAX_RANK, DEPENDENT,
        )  # fmt: skip
    else:
        for block in range(tl.program_id(1), tl.load(num_blocks), tl.num_programs(1)):
            first, count, slot = block_at(blocks, block)
            _piece_of_block(
                residual, delta, also, scale, out, squares, data, scales, hidden, pool, table,
                first, count, slot, cols, num_rows, n, delta_split, delta_row, also_split,
                also_row, hidden_split, hidden_row, NUM_SPLITS, ALSO, HIDDEN_SPLITS, PARTS,
                BLOCK_R, RANK_BLOCK, MAX_RANK, DEPENDENT,
            )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    A step's first kernel: everything written before it is a constant for all later kernels.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    _add_rms_norm[(rows,)](
        x, x, x, weight, weight, out, x, x, x, x, x, x, rows, n, eps, 1.0, 0, 0, 0, 0, 0, 0,
        NUM_SPLITS=0, ALSO=0, HIDDEN_SPLITS=0, RANKS=8, HAS_POST=False, HAS_FACTOR=False,
        HAS_OUT=True, PARTS=0, GROUP=ROW_GROUP, RUN=0, BLOCK=triton.next_power_of_2(n),
        num_warps=_warps(n),
        **launch_options(x.device, plainly=True),
    )  # fmt: skip
    return out


@triton.jit
def _sum_rms_norm(
    sums, weight, out, n, eps, in_split, in_row,
    NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    ok = cols < n
    scale = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        at = sums + split * in_split + row * in_row + cols
        total += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total) / n + eps)
    tl.store(out + row * n + cols, total * inverse * scale, mask=ok)


def sum_rms_norm(sums: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`rms_norm` of rows [rows, n] or of the sum of partial sums [splits, rows, n], in `dtype`.
    Rows need not be adjacent."""
    parts = as_splits(sums)
    num_splits, rows, n = parts.shape
    out = torch.empty(rows, n, dtype=dtype, device=sums.device)
    _sum_rms_norm[(rows,)](
        parts, weight, out, n, eps, *parts.stride()[:2], NUM_SPLITS=num_splits,
        BLOCK=triton.next_power_of_2(n), num_warps=_warps(n), **launch_options(sums.device),
    )  # fmt: skip
    return out


def add_rms_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    lora: LoraTerm | None = None,
    post: Tensor | None = None,
    factor: float = 1.0,
    form: Fp8Form | None = None,
    also: Tensor | None = None,
) -> Tensor | Fp8Rows:
    """Add `delta` ([rows, n], or partial sums [splits, rows, n]), `also` likewise and the
    adapters' part to `residual` in place. Returns the sum, normalised, in the `form` that the next
    product reads. With `post`, the addend is itself normalised and scaled by it first. The addend
    is multiplied with `factor`."""
    rows, n = residual.shape
    parts = as_splits(delta)
    others = parts if also is None else as_splits(also)
    block = triton.next_power_of_2(n)
    is_fused = form is not None and form.group in (None, ROW_GROUP, n) and block >= ROW_GROUP
    has_out = form is None or form.keeps_values or not is_fused
    out = torch.empty_like(residual) if has_out else None
    found = None
    if form is not None and is_fused:
        group = form.group or n
        found = empty_rows(rows, n, form, group, out if form.keeps_values else None, residual)
    has_tries = found is not None and tries_scales(len(found.data), found.group, n)
    if lora is None:
        adapters = (residual, residual, residual, residual)
        strides, splits = (0, 0), 0
    else:
        hidden = lora.hidden
        adapters = (lora.rows.slots, hidden, lora.site.pool, lora.site.table)
        strides, splits = (hidden.stride(0), hidden.stride(1)), hidden.shape[0]
    _add_rms_norm[(rows,)](
        residual, parts, others, weight, weight if post is None else post,
        residual if out is None else out, *_places(found, residual), *adapters, rows, n, eps,
        factor, *parts.stride()[:2], *others.stride()[:2], *strides,
        NUM_SPLITS=parts.shape[0], ALSO=0 if also is None else others.shape[0],
        HIDDEN_SPLITS=splits, RANKS=8, HAS_POST=post is not None,
        HAS_FACTOR=factor != 1.0, HAS_OUT=has_out, PARTS=0 if found is None else len(found.data),
        GROUP=block if found is not None and found.group == n else ROW_GROUP,
        RUN=run_length(n) if has_tries else 0, BLOCK=block, num_stages=1,
        num_warps=_warps(n // 4 if has_tries else n), **launch_options(residual.device),
    )  # fmt: skip
    if found is not None:
        return found
    assert out is not None
    return out if form is None else in_fp8(out, form)


def _places(rows: Fp8Rows | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Destination of rows in FP8; without FP8, placeholders."""
    return (other, other) if rows is None else (rows.data, rows.scales)


def add_norm(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    lora: LoraTerm,
    form: Fp8Form | None = None,
    also: Tensor | None = None,
) -> DeferredRMSNorm:
    """`add_rms_norm` without its division. Up to 64 rows."""
    num_rows, n = residual.shape
    parts, hidden, rows = as_splits(delta), lora.hidden, lora.rows
    others = parts if also is None else as_splits(also)
    block_r, num_programs = rows.programs
    ranks = rank_constants(lora.site)
    out = torch.empty_like(residual)
    num_pieces = triton.cdiv(n, PIECE)
    squares = torch.empty(num_rows, num_pieces, dtype=torch.float32, device=residual.device)
    found = None
    if form is not None and form.group in (None, PIECE):
        found = empty_rows(num_rows, n, form, PIECE, out, residual)
    _add_norm_piece[(num_pieces, num_programs)](
        residual, parts, others, weight, out, squares, *_places(found, residual), hidden,
        lora.site.pool, lora.site.table, rows.slots, rows.blocks, rows.num_blocks, num_rows, n,
        *parts.stride()[:2], *others.stride()[:2], *hidden.stride()[:2],
        NUM_SPLITS=parts.shape[0], ALSO=0 if also is None else others.shape[0],
        HIDDEN_SPLITS=hidden.shape[0],
        PARTS=0 if found is None else len(found.data), BLOCK_R=block_r, BLOCK_N=PIECE,
        **ranks, num_warps=2 if block_r == 1 and has_few_ranks(lora.site) else 4,
        num_stages=1, maxnreg=None if block_r == 1 else PIECE_REGISTERS,
        **launch_options(residual.device),
    )  # fmt: skip
    if form is not None and found is None:
        found = in_fp8(out, form)
    return DeferredRMSNorm(out, squares, eps, found)


def _warps(n: int) -> int:
    """About eight elements per thread. If scales are tried, which every warp computes for itself,
    four times as many are faster (H200, 8192 rows: 59.6 us instead of 73.7)."""
    return max(1, min(16, (1 << (n - 1).bit_length()) // 256))
