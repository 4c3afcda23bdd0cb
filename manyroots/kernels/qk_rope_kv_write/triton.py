"""Everything between the qkv product and attention in one kernel.

Same signatures as `reference.py`. A program has one head of a tile of tokens with the same adapter.
The two halves of a head are two tiles, because a rotation mixes them. Each tile has first the
rotated coordinates and then, in models that rotate only part of a head, half of the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels import scaled
from manyroots.kernels.launch import as_splits, launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.lora_ops.sites import FEW_ROWS, LoraTerm
from manyroots.kernels.lora_ops.triton import (
    NO_RANKS,
    STEP_OF_RANKS,
    block_at,
    early_ranks,
    expand_tile,
    has_few_ranks,
    part_of,
    rank_constants,
    shrunk,
    single_rows_of,
)
from manyroots.kernels.qk_rope_kv_write.inputs import QkNorm, RopeTable, SlotMapping

LARGEST = tl.constexpr(scaled.LARGEST)
MANY_ROWS = 64
"""With more rows than this a step has enough programs, and larger programs read faster."""
ADAPTED, ADAPTED_PROMPTS = (1, None), (4, 80)
"""Warps of a program with an adapter of few ranks, and most registers of a thread, so that more
programs run at once: in steps of more than MANY_ROWS, and of more than FEW_ROWS."""


@triton.jit
def _places_of(d, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Offsets of the coordinates of a head's two tiles."""
    return tl.where(d < PAIRS, d, d + PAIRS), tl.where(d < PAIRS, d + PAIRS, d + HALF)


@triton.jit
def _inputs(
    qkv, hidden, b_all, start, rank, first, begin, count, in_split, in_row, hidden_split,
    hidden_row,
    HALF: tl.constexpr, PAIRS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HIDDEN_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the two tiles of this program's head for BLOCK_R tokens of a block from `begin` on, and
    what their adapter multiplies; zeros past the block's last token."""
    at_a, at_b = _places_of(tl.arange(0, HALF), HALF, PAIRS)
    r = begin + tl.arange(0, BLOCK_R)
    rows = (first + r).to(tl.int64)
    ok = (r < count)[:, None]
    source = qkv + rows[:, None] * in_row + tl.program_id(0) * (2 * HALF)
    from_a, from_b = source + at_a[None, :], source + at_b[None, :]
    a = tl.load(from_a, mask=ok, other=0.0)
    b = tl.load(from_b, mask=ok, other=0.0)
    if NUM_SPLITS > 1:
        a, b = a.to(tl.float32), b.to(tl.float32)
        for split in tl.static_range(1, NUM_SPLITS):
            a += tl.load(from_a + split * in_split, mask=ok, other=0.0).to(tl.float32)
            b += tl.load(from_b + split * in_split, mask=ok, other=0.0).to(tl.float32)
    first_hidden = a
    if HIDDEN_SPLITS:
        first_hidden = shrunk(
            0, start, rank, hidden, hidden_split, hidden_row, rows, r < count, b_all,
            HIDDEN_SPLITS, RANK_BLOCK,
        )  # fmt: skip
    return a, b, first_hidden


@triton.jit
def _write_tile(
    first_half, second_half, head, rows, row_ok, page, offset, at_a, at_b, q_out, layer_kv,
    page_stride, part_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Store queries in the output, keys and values in their pages."""
    if head < NUM_HEADS:
        to = q_out + (rows[:, None] * NUM_HEADS + head) * (2 * HALF)
        tl.store(to + at_a[None, :], first_half, mask=row_ok[:, None])
        tl.store(to + at_b[None, :], second_half, mask=row_ok[:, None])
    else:
        is_value = head >= NUM_HEADS + NUM_KV
        kv_head = (head - NUM_HEADS) % NUM_KV
        base = page * page_stride + offset * token_stride + kv_head * (2 * HALF)
        base += tl.where(is_value, part_stride, 0)
        place = layer_kv + base[:, None]  # not `to`: that points to numbers of another dtype
        if layer_kv.dtype.element_ty == tl.float8e4nv:
            # Numbers beyond the range become the largest, not NaN.
            first_half = tl.clamp(first_half, -LARGEST, LARGEST, tl.PropagateNan.ALL)
            second_half = tl.clamp(second_half, -LARGEST, LARGEST, tl.PropagateNan.ALL)
        tl.store(place + at_a[None, :], first_half, mask=(page >= 0)[:, None])
        tl.store(place + at_b[None, :], second_half, mask=(page >= 0)[:, None])


@triton.jit
def _head_of_rows(
    inputs, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all, start,
    rank, a_ranks, b_ranks, a_cols, b_cols, first, count, begin, eps, hidden_split, hidden_row,
    page_stride, part_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
):  # fmt: skip
    """Compute one head of `count` tokens from `begin` on that use one adapter, of these
    `_inputs`."""
    head = tl.program_id(0)
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV)
    d = tl.arange(0, HALF)
    at_a, at_b = _places_of(d, HALF, PAIRS)
    r = begin + tl.arange(0, BLOCK_R)
    row_ok = r < count
    rows = (first + r).to(tl.int64)
    # All loads come first, so that they wait for memory together.
    is_kept = r < tl.where(head < NUM_HEADS, 0, count)
    page = tl.load(pages + rows, mask=is_kept, other=-1).to(tl.int64)
    offset = tl.load(offsets + rows, mask=is_kept, other=0).to(tl.int64)
    if PAIRS:
        angle = rows[:, None] * PAIRS + d[None, :]
        num_rotated = tl.where(head < NUM_HEADS + NUM_KV, count, 0)
        is_rotated = (r < num_rotated)[:, None] & (d < PAIRS)[None, :]
        c = tl.load(cos + angle, mask=is_rotated, other=1.0)
        s = tl.load(sin + angle, mask=is_rotated, other=0.0)
    a, b = inputs[0].to(tl.float32), inputs[1].to(tl.float32)
    if HIDDEN_SPLITS:
        a = expand_tile(
            a, inputs[2], a_ranks, b_all, start, rank, a_cols, hidden, hidden_split, hidden_row,
            rows, row_ok, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
        b = expand_tile(
            b, inputs[2], b_ranks, b_all, start, rank, b_cols, hidden, hidden_split, hidden_row,
            rows, row_ok, HIDDEN_SPLITS, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
    if head < NUM_HEADS + NUM_KV:
        if HAS_NORM:
            weight = tl.where(is_key, k_weight, q_weight)
            squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
            inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            a *= inverse * tl.load(weight + at_a).to(tl.float32)[None, :]
            b *= inverse * tl.load(weight + at_b).to(tl.float32)[None, :]
        if PAIRS:
            rotated = a * c - b * s
            b = b * c + a * s
            a = rotated
    _write_tile(
        a, b, head, rows, row_ok, page, offset, at_a, at_b, q_out, layer_kv, page_stride,
        part_stride, token_stride, NUM_HEADS, NUM_KV, HALF,
    )  # fmt: skip


@triton.jit
def _single_rows(
    qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all, start, rank,
    a_cols, b_cols, first, count, eps, in_split, in_row, hidden_split, hidden_row, page_stride,
    part_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    SINGLE_ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one head of a block of up to SINGLE_ROWS tokens, token by token."""
    a_ranks = early_ranks(b_all, rank, a_cols, RANK_BLOCK, MAX_RANK, DEPENDENT)
    b_ranks = early_ranks(b_all, rank, b_cols, RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    inputs = ()
    for row in tl.static_range(SINGLE_ROWS):
        of_row = _inputs(
            qkv, hidden, b_all, start, rank, first, row, count, in_split, in_row, hidden_split,
            hidden_row, HALF, PAIRS, NUM_SPLITS, HIDDEN_SPLITS, 1, RANK_BLOCK,
        )  # fmt: skip
        inputs += (of_row,)  # type: ignore[assignment]
    for row in tl.static_range(SINGLE_ROWS):
        if row < count:
            _head_of_rows(
                inputs[row], cos, sin, q_weight, k_weight, q_out, layer_kv, pages,
                offsets, hidden, b_all, start, rank, a_ranks, b_ranks, a_cols, b_cols, first,
                count, row, eps, hidden_split, hidden_row, page_stride, part_stride, token_stride,
                NUM_HEADS, NUM_KV, HALF, PAIRS, HAS_NORM, HIDDEN_SPLITS, 1, RANK_BLOCK, MAX_RANK,
            )  # fmt: skip


@triton.jit
def _rows_together(
    qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all, start, rank,
    a_cols, b_cols, first, count, eps, in_split, in_row, hidden_split, hidden_row, page_stride,
    part_stride, token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, AHEAD: tl.constexpr, RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one head of a block, BLOCK_R tokens at a time. AHEAD: load the next tokens before
    these are computed."""
    a_ranks = early_ranks(b_all, rank, a_cols, RANK_BLOCK, MAX_RANK, DEPENDENT)
    b_ranks = early_ranks(b_all, rank, b_cols, RANK_BLOCK, MAX_RANK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    inputs = _inputs(
        qkv, hidden, b_all, start, rank, first, 0, count, in_split, in_row, hidden_split,
        hidden_row, HALF, PAIRS, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK,
    )  # fmt: skip
    for begin in range(0, count, BLOCK_R):
        now = inputs
        if AHEAD:
            inputs = _inputs(
                qkv, hidden, b_all, start, rank, first, begin + BLOCK_R, count, in_split,
                in_row, hidden_split, hidden_row, HALF, PAIRS, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R,
                RANK_BLOCK,
            )  # fmt: skip
        _head_of_rows(
            now, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all,
            start, rank, a_ranks, b_ranks, a_cols, b_cols, first, count, begin, eps, hidden_split,
            hidden_row, page_stride, part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS,
            HAS_NORM, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
        if not AHEAD:
            inputs = _inputs(
                qkv, hidden, b_all, start, rank, first, begin + BLOCK_R, count, in_split,
                in_row, hidden_split, hidden_row, HALF, PAIRS, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R,
                RANK_BLOCK,
            )  # fmt: skip


@triton.jit
def _head_of_block(
    qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, pool, table, first,
    count, slot, eps, in_split, in_row, hidden_split, hidden_row, page_stride, part_stride,
    token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, AHEAD: tl.constexpr, SINGLE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one head of a block."""
    head = tl.program_id(0)
    # The site's parts are q, k, v; rows of B count from the part's own first.
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV)
    part = tl.where(head < NUM_HEADS, 0, tl.where(is_key, 1, 2))
    part_head = tl.where(head < NUM_HEADS, head, (head - NUM_HEADS) % NUM_KV)
    start, rank, b_all = part_of(pool, table, slot, part, 3)
    at_a, at_b = _places_of(tl.arange(0, HALF), HALF, PAIRS)
    a_cols = part_head * (2 * HALF) + at_a
    b_cols = part_head * (2 * HALF) + at_b
    if count <= SINGLE_ROWS:
        _single_rows(
            qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all,
            start, rank, a_cols, b_cols, first, count, eps, in_split, in_row, hidden_split,
            hidden_row, page_stride, part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS,
            HAS_NORM, NUM_SPLITS, HIDDEN_SPLITS, SINGLE_ROWS,
            STEP_OF_RANKS if MAX_RANK <= STEP_OF_RANKS else RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
    elif BLOCK_R > 1:
        _rows_together(
            qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, b_all,
            start, rank, a_cols, b_cols, first, count, eps, in_split, in_row, hidden_split,
            hidden_row, page_stride, part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS,
            HAS_NORM, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, AHEAD, RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _qk_rope_kv_write(
    qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets,
    hidden, pool, table, slots, blocks, num_blocks,
    num_rows, eps, in_split, in_row, hidden_split, hidden_row, page_stride, part_stride,
    token_stride,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, AHEAD: tl.constexpr, SINGLE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    program = tl.program_id(1)
    if HIDDEN_SPLITS == 0:
        first = program * BLOCK_R
        count = tl.minimum(BLOCK_R, num_rows - first)
        wait_for_inputs(DEPENDENT)
        inputs = _inputs(
            qkv, hidden, hidden, 0, 0, first, 0, count, in_split, in_row, hidden_split, hidden_row,
            HALF, PAIRS, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, RANK_BLOCK,
        )  # fmt: skip
        _head_of_rows(
            inputs, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, hidden,
            0, 0, 0, 0, 0, 0, first, count, 0, eps, hidden_split, hidden_row, page_stride,
            part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS, HAS_NORM, HIDDEN_SPLITS,
            BLOCK_R, RANK_BLOCK, MAX_RANK,
        )  # fmt: skip
    elif BLOCK_R == 1:
        _head_of_block(
            qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, pool,
            table, program, 1, tl.load(slots + program), eps, in_split, in_row, hidden_split,
            hidden_row, page_stride, part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS,
            HAS_NORM, NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, AHEAD, SINGLE_ROWS,
            RANK_BLOCK, MAX_RANK, DEPENDENT,
        )  # fmt: skip
    else:
        for block in range(program, tl.load(num_blocks), tl.num_programs(1)):
            first, count, slot = block_at(blocks, block)
            _head_of_block(
                qkv, cos, sin, q_weight, k_weight, q_out, layer_kv, pages, offsets, hidden, pool,
                table, first, count, slot, eps, in_split, in_row, hidden_split, hidden_row,
                page_stride, part_stride, token_stride, NUM_HEADS, NUM_KV, HALF, PAIRS, HAS_NORM,
                NUM_SPLITS, HIDDEN_SPLITS, BLOCK_R, AHEAD, SINGLE_ROWS, RANK_BLOCK, MAX_RANK,
                DEPENDENT,
            )  # fmt: skip


def qk_rope_kv_write(
    qkv: Tensor,
    angles: RopeTable,
    norm: QkNorm | None,
    layer_kv: Tensor,
    slot_mapping: SlotMapping,
    lora: LoraTerm | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns q [tokens, heads, head_dim] of qkv [tokens, (heads + 2 kv_heads) head_dim] (or
    partial sums of it) in `dtype`. Writes k and v into layer_kv [pages, 2, page_size, kv_heads,
    head_dim]. Without `dtype`, queries have the dtype of layer_kv."""
    parts = as_splits(qkv)
    num_rows = parts.shape[1]
    kv_heads, head_dim = layer_kv.shape[-2:]
    num_heads = parts.shape[2] // head_dim - 2 * kv_heads
    registers: int | None = None
    single_rows = 1
    kept = dtype or layer_kv.dtype
    q_out = torch.empty(num_rows, num_heads, head_dim, dtype=kept, device=qkv.device)
    weights = (parts, parts) if norm is None else (norm.q_weight, norm.k_weight)
    if lora is None:
        adapters = (parts, parts, parts, parts, parts, parts)
        strides, splits, ranks = (0, 0), 0, NO_RANKS
        block_r, num_warps = (1, 1) if num_rows <= 16 else (4, 1)
        if num_rows > MANY_ROWS:
            block_r, num_warps = 16, 4
        num_programs = triton.cdiv(num_rows, block_r)
    else:
        hidden, rows = lora.hidden, lora.rows
        adapters = (
            hidden, lora.site.pool, lora.site.table, rows.slots, rows.blocks, rows.num_blocks,
        )  # fmt: skip
        strides, splits = (hidden.stride(0), hidden.stride(1)), hidden.shape[0]
        block_r, num_programs = rows.programs
        num_warps = 4
        if num_rows > MANY_ROWS and has_few_ranks(lora.site):
            num_warps, registers = ADAPTED if num_rows <= FEW_ROWS else ADAPTED_PROMPTS
            single_rows = single_rows_of(lora.site, num_rows, splits)
        ranks = rank_constants(lora.site)
    _qk_rope_kv_write[(num_heads + 2 * kv_heads, num_programs)](
        parts, angles.cos, angles.sin, *weights, q_out, layer_kv, slot_mapping.pages,
        slot_mapping.offsets, *adapters, num_rows, 0.0 if norm is None else norm.eps,
        parts.stride(0), parts.stride(1), *strides,
        layer_kv.stride(0), layer_kv.stride(1), layer_kv.stride(2),
        NUM_HEADS=num_heads, NUM_KV=kv_heads, HALF=head_dim // 2, PAIRS=angles.cos.shape[1],
        HAS_NORM=norm is not None, NUM_SPLITS=parts.shape[0], HIDDEN_SPLITS=splits,
        BLOCK_R=block_r, AHEAD=num_rows > FEW_ROWS, SINGLE_ROWS=single_rows, **ranks,
        num_warps=num_warps, num_stages=1, maxnreg=registers, **launch_options(qkv.device),
    )  # fmt: skip
    return q_out


@triton.jit
def _look_up(positions, all_cos, all_sin, cos, sin, half, PADDED_HALF: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED_HALF)
    ok = d < half
    at = tl.load(positions + i) * half + d
    tl.store(cos + i * half + d, tl.load(all_cos + at, mask=ok), mask=ok)
    tl.store(sin + i * half + d, tl.load(all_sin + at, mask=ok), mask=ok)


def look_up(table: RopeTable, positions: Tensor, dtype: torch.dtype) -> RopeTable:
    """The rotation of tokens at `positions`, once per step for all layers with the same
    rotation."""
    num_rows, half = positions.shape[0], table.cos.shape[1]
    cos, sin = table.cos.new_empty(2, num_rows, half)
    if not half:
        return RopeTable(cos, sin)
    # A plain launch: its output is a constant for the kernels that follow.
    _look_up[(num_rows,)](
        positions, table.cos, table.sin, cos, sin, half, PADDED_HALF=triton.next_power_of_2(half)
    )
    return RopeTable(cos, sin)
