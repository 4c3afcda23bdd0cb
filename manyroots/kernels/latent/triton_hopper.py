"""Latent decode on Hopper GPUs, in Gluon: each latent is read once and used as key and as value.

Same signature as `reference.py`, for what `is_for` takes; the rest goes to `triton_decode.py`. All
rows' tiles of tokens form one list. Each program takes an equal range of it, so the work follows
the lengths while the launch does not. A row that several programs share is merged by a second
launch. A program has a warp that asks the copy engine for pages, and:

    up to 32 heads   8 warps; tokens are the rows of the matrix instructions, heads the columns,
                     so that no instruction computes heads that do not exist
    more heads       two groups of 4 warps for 64 heads. Each scores one of two tiles and has half
                     of the output's columns, because registers do not hold all of them

Scores are in units of log2, because exp2 is what the chip has. Whole pages are read: what lies in
the last one after the last token is cleared before it is used as a value.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manyroots.kernels.launch import (
    is_hopper,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)

LOG2_E = math.log2(math.e)
LATENT, ROPE = 512, 64
HALF = gl.constexpr(256)
"""Columns of a copy, and of the output that one group of warps has."""
ROPE_DIM = gl.constexpr(ROPE)
TOKENS = gl.constexpr(64)
"""Of a tile."""
STAGES = gl.constexpr(2)
"""Tiles that are there or on their way; shared memory holds no more."""
FEW_HEADS = 32
MANY = gl.constexpr(64)
"""Heads of a program: rows of one matrix instruction."""
MAX_ROWS = 4096
FEW_WARPS = 8
MANY_REGISTERS = gl.constexpr(232)
COPY_REGISTERS = gl.constexpr(40)
FEW_COPY_REGISTERS = gl.constexpr(96)
"""Of a thread."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


def _quota(total, longest, num_parts):
    """How many tiles a part takes: an equal share, or the longest row where that is hardly more, so
    that rows of one length are not split."""
    quota = (total + num_parts - 1) // num_parts
    if longest > quota:
        if longest * 8 <= quota * 9:
            quota = longest
    if quota < 1:
        quota = quota * 0 + 1
    return quota


_quota_in_gluon = gluon.jit(_quota)
_quota_in_triton = triton.jit(_quota)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _plan(
    lengths, num_rows, part, num_parts,
    ROWS: gl.constexpr, UNIT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Where a part begins: the row, the unit of tokens in it, and how many units the part has."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    r = gl.arange(0, ROWS, layout)
    units = (gl.load(lengths + r, mask=r < num_rows, other=0) + UNIT - 1) // UNIT
    ends = gl.associative_scan(units, 0, _add)
    total = gl.sum(units, 0)
    quota = _quota_in_gluon(total, gl.max(units, 0), num_parts)
    first = part * quota
    is_before = ends <= first
    row = gl.sum(is_before.to(gl.int32), 0)
    unit = first - gl.sum(gl.where(is_before, units, 0), 0)
    return row, unit, gl.minimum(total - first, quota)


@gluon.jit
def _ask_for_tile(
    descs, ring, at, table, first, last_page, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr
):  # fmt: skip
    """Copy the tile whose first token is `first` into the ring, as its `at`-th, as soon as its
    place is free. Pages after the last are the last once more."""
    half_desc, rope_desc = descs
    full, empty = ring[3], ring[4]
    stage = at % STAGES
    copies: gl.constexpr = TOKENS // COPIED
    pages = ()
    for j in gl.static_range(copies):
        page = gl.minimum((first + j * COPIED) // PAGE_SIZE, last_page)
        pages += (gl.load(table + page),)  # type: ignore[assignment]
    mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
    mbarrier.expect(
        full.index(stage), copies * (2 * half_desc.block_type.nbytes + rope_desc.block_type.nbytes)
    )
    bar = full.index(stage)
    for j in gl.static_range(copies):
        offset = (first + j * COPIED) % PAGE_SIZE
        for p in gl.static_range(3):
            _load(
                rope_desc if p == 2 else half_desc, [pages[j], offset, p * HALF], bar,
                ring[p].index(stage).slice(j * COPIED, COPIED),
            )  # fmt: skip


@gluon.jit
def _copy(
    q_descs, descs, queries, ring, plan, lengths, page_table, table_row, num_heads, first_head,
    TILES: gl.constexpr, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The part of the one warp: queries, and TILES tiles of each unit."""
    row, unit, num_left = plan
    q_left, q_right, q_rope, q_full, q_empty = queries
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        count = gl.minimum(gl.cdiv(length, TILES * TOKENS) - unit, num_left)
        if count > 0:
            table = page_table + row.to(gl.int64) * table_row
            last_page = (length - 1) // PAGE_SIZE
            for i in range(count * TILES):
                _ask_for_tile(
                    descs, ring, at + i, table, (unit * TILES + i) * TOKENS, last_page,
                    PAGE_SIZE, COPIED,
                )  # fmt: skip
                if i == 0:  # after the tile: the last row's queries may be in use for some time
                    half, rope = q_descs
                    mbarrier.wait(q_empty, (asked & 1) ^ 1)
                    mbarrier.expect(q_full, 2 * half.block_type.nbytes + rope.block_type.nbytes)
                    first = row * num_heads + first_head
                    _load(half, [first, 0], q_full, q_left)
                    _load(half, [first, HALF], q_full, q_right)
                    _load(rope, [first, 2 * HALF], q_full, q_rope)
            asked += 1
            at += count * TILES
        num_left -= count
        row += 1
        unit = 0


@gluon.jit
def _clear_after(tile, first, length, WARPS: gl.constexpr):
    """Zeros in the place of values of no token: nothing times such a value may be not a number. A
    few at a time, for want of registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    for j in gl.static_range(TOKENS // 8):
        few = tile.slice(j * 8, 8)
        t = first + j * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout))
        few.store(gl.where((t < length)[:, None], few.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _score_few(queries, ring, at, HEADS: gl.constexpr, layout: gl.constexpr):
    """Begin a tile's scores [tokens, heads] when it is there: three products."""
    left, right, rope, full, _ = ring
    q_left, q_right, q_rope, _, _ = queries
    stage = at % STAGES
    mbarrier.wait(full.index(stage), at // STAGES & 1)
    none = gl.zeros([TOKENS, HEADS], gl.float32, layout)
    scores = warpgroup_mma(
        left.index(stage), q_left.permute((1, 0)), none, use_acc=False, is_async=True
    )
    scores = warpgroup_mma(right.index(stage), q_right.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma(rope.index(stage), q_rope.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _take_in_few(
    scores, ring, stage, weights_at, first, length, scale, best, totals, acc_left, acc_right,
    WARPS: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Make weights of a tile's scores and begin to add its values: two products."""
    left, right = ring[0].index(stage), ring[1].index(stage)
    t = first + gl.arange(0, TOKENS, gl.SliceLayout(1, s_layout))
    scores = gl.where((t < length)[:, None], scores * scale, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 0))
    shrink = gl.exp2(best - higher)
    weights = gl.exp2(scores - higher[None, :])
    totals = totals * shrink[None, :] + weights
    weights_at.store(weights.to(left.dtype))
    fence_async_shared()
    if first + TOKENS > length:
        _clear_after(left, first, length, WARPS)
        _clear_after(right, first, length, WARPS)
    factor = gl.convert_layout(shrink, gl.SliceLayout(0, o_layout))[None, :]
    acc_left = warpgroup_mma(left.permute((1, 0)), weights_at, acc_left * factor, is_async=True)
    acc_right = warpgroup_mma(right.permute((1, 0)), weights_at, acc_right * factor, is_async=True)
    return higher, totals, acc_left, acc_right


@gluon.jit
def _attend_few(
    queries, ring, weights_at, plan, lengths, out, partial, sums, scale, part, num_parts,
    num_heads, HEADS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The part of the other warps: all tokens of a part."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, HEADS * 4 // WARPS, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEADS, 16])
    row, unit, num_left = plan
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        num_units = gl.cdiv(length, TOKENS)
        count = gl.minimum(num_units - unit, num_left)
        if count > 0:
            best = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, s_layout))
            totals = gl.zeros([TOKENS, HEADS], gl.float32, s_layout)
            acc_left = gl.zeros([HALF, HEADS], gl.float32, o_layout)
            acc_right = gl.zeros([HALF, HEADS], gl.float32, o_layout)
            mbarrier.wait(queries[3], asked & 1)
            scores = _score_few(queries, ring, at, HEADS, s_layout)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            for i in range(count - 1):
                stage = (at + i) % STAGES
                best, totals, acc_left, acc_right = _take_in_few(
                    scores, ring, stage, weights_at, (unit + i) * TOKENS, length, scale, best,
                    totals, acc_left, acc_right, WARPS, s_layout, o_layout,
                )  # fmt: skip
                # The next tile's scores follow at once, before this one's values are done.
                ahead = _score_few(queries, ring, at + i + 1, HEADS, s_layout)
                acc_left, acc_right = warpgroup_mma_wait(3, deps=(acc_left, acc_right))
                mbarrier.arrive(ring[4].index(stage))
                scores = warpgroup_mma_wait(0, deps=(ahead,))
            mbarrier.arrive(queries[4])
            stage = (at + count - 1) % STAGES
            best, totals, acc_left, acc_right = _take_in_few(
                scores, ring, stage, weights_at, (unit + count - 1) * TOKENS, length, scale, best,
                totals, acc_left, acc_right, WARPS, s_layout, o_layout,
            )  # fmt: skip
            acc_left, acc_right = warpgroup_mma_wait(0, deps=(acc_left, acc_right))
            mbarrier.arrive(ring[4].index(stage))
            total = gl.sum(totals, 0)
            factor = gl.convert_layout(1.0 / total, gl.SliceLayout(0, o_layout))[None, :]
            h = gl.arange(0, HEADS, gl.SliceLayout(0, o_layout))
            d = gl.arange(0, HALF, gl.SliceLayout(1, o_layout))
            to = h[None, :] * (2 * HALF) + d[:, None]
            ok = (h < num_heads)[None, :]
            if (unit == 0) & (count == num_units):
                to += row * num_heads * (2 * HALF)
                gl.store(out + to, (acc_left * factor).to(out.dtype.element_ty), mask=ok)
                gl.store(out + to + HALF, (acc_right * factor).to(out.dtype.element_ty), mask=ok)
            else:
                slot = gl.where(unit == 0, num_parts + part, part)
                to += slot * num_heads * (2 * HALF)
                gl.store(partial + to, acc_left * factor, mask=ok)
                gl.store(partial + to + HALF, acc_right * factor, mask=ok)
                g = gl.arange(0, HEADS, gl.SliceLayout(0, s_layout))
                gl.store(sums + slot * num_heads + g, best + gl.log2(total), mask=g < num_heads)
            asked += 1
            at += count
        num_left -= count
        row += 1
        unit = 0


@gluon.jit
def _swap(values, places, ready, count, own):
    """The other group's numbers in exchange for this one's. Of two places each the other may still
    read the one before."""
    at = (count & 1) * 2
    places.index(at + own).store(values)
    mbarrier.arrive(ready.index(own))
    mbarrier.wait(ready.index(own ^ 1), count & 1)
    return places.index(at + (own ^ 1)).load(values.type.layout)


@gluon.jit
def _take_in_many(
    at, queries, ring, mine, tops, tops_ready, weights_ready, swaps, first, length, scale, best,
    total, acc, own, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """A pair of tiles: the scores and weights of its own, and of both its half of the values. A
    tile's weights lie where its rotated part was."""
    left, right, rope, full, empty = ring
    q_left, q_right, q_rope, _, _ = queries
    phase = at & 1
    mbarrier.wait(full.index(own), phase)
    none = gl.zeros([MANY, TOKENS], gl.float32, s_layout)
    scores = warpgroup_mma(
        q_left, left.index(own).permute((1, 0)), none, use_acc=False, is_async=True
    )
    scores = warpgroup_mma(q_right, right.index(own).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(q_rope, rope.index(own).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    t = first + own * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, s_layout))
    scores = gl.where((t < length)[None, :], scores * scale, float("-inf"))
    top = gl.max(scores, 1)
    other = _swap(top, tops, tops_ready, swaps, own)
    higher = gl.maximum(best, gl.maximum(top, other))
    shrink = gl.exp2(best - higher)
    weights = gl.exp2(scores - higher[:, None])
    total = total * shrink + gl.sum(weights, 1)
    rope.index(own).store(weights.to(rope.dtype))
    fence_async_shared()
    mbarrier.arrive(weights_ready.index(own))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    mbarrier.wait(full.index(own ^ 1), phase)
    if first + 2 * TOKENS > length:
        _clear_after(mine.index(0), first, length, 4)
        _clear_after(mine.index(1), first + TOKENS, length, 4)
    mbarrier.wait(weights_ready.index(0), phase)
    acc = warpgroup_mma(rope.index(0), mine.index(0), acc, is_async=True)
    mbarrier.wait(weights_ready.index(1), phase)
    acc = warpgroup_mma(rope.index(1), mine.index(1), acc, is_async=True)
    total = warpgroup_mma_wait(1, deps=(total,))
    mbarrier.arrive(empty.index(0))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(1))
    return higher, total, acc


@gluon.jit
def _attend_many(
    queries, ring, mine, tops, tops_ready, weights_ready, plan, lengths, out, partial, sums, scale,
    part, num_parts, num_heads, first_head, own,
):  # fmt: skip
    """The part of four warps."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row, unit, num_left = plan
    at, asked, swaps = 0, 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        num_units = gl.cdiv(length, 2 * TOKENS)
        count = gl.minimum(num_units - unit, num_left)
        if count > 0:
            best = gl.full([MANY], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
            total = gl.zeros([MANY], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([MANY, HALF], gl.float32, o_layout)
            mbarrier.wait(queries[3], asked & 1)
            for i in range(count):
                best, total, acc = _take_in_many(
                    at + i, queries, ring, mine, tops, tops_ready, weights_ready, swaps + i,
                    (unit + i) * (2 * TOKENS), length, scale, best, total, acc, own, s_layout,
                    o_layout,
                )  # fmt: skip
            mbarrier.arrive(queries[4])
            total += _swap(total, tops, tops_ready, swaps + count, own)
            factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
            h = first_head + gl.arange(0, MANY, gl.SliceLayout(1, o_layout))
            d = own * HALF + gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
            to = h[:, None] * (2 * HALF) + d[None, :]
            ok = (h < num_heads)[:, None]
            if (unit == 0) & (count == num_units):
                to += row * num_heads * (2 * HALF)
                gl.store(out + to, (acc * factor).to(out.dtype.element_ty), mask=ok)
            else:
                slot = gl.where(unit == 0, num_parts + part, part)
                gl.store(partial + slot * num_heads * (2 * HALF) + to, acc * factor, mask=ok)
                g = first_head + gl.arange(0, MANY, gl.SliceLayout(1, s_layout))
                gl.store(sums + slot * num_heads + g, best + gl.log2(total), mask=g < num_heads)
            asked += 1
            at += count
            swaps += count + 1
        num_left -= count
        row += 1
        unit = 0


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def _places(
    q_descs, HEADS: gl.constexpr, READERS: gl.constexpr
):  # fmt: skip
    """Shared memory of queries and of the ring: each with whether it is full, and whether those
    that read it are done."""
    half_desc, rope_desc = q_descs
    dtype: gl.constexpr = half_desc.dtype
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HALF], dtype)
    rope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, ROPE_DIM], dtype)
    queries = (
        gl.allocate_shared_memory(dtype, [HEADS, HALF], half_desc.layout),
        gl.allocate_shared_memory(dtype, [HEADS, HALF], half_desc.layout),
        gl.allocate_shared_memory(dtype, [HEADS, ROPE_DIM], rope_desc.layout),
        _barriers(1, 1).index(0), _barriers(1, READERS).index(0),
    )  # fmt: skip
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, HALF], half),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, HALF], half),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, ROPE_DIM], rope),
        _barriers(STAGES, 1), _barriers(STAGES, READERS),
    )  # fmt: skip
    return queries, ring


@gluon.jit(
    do_not_specialize=["table_row", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _few(
    q_half, q_rope, half, rope, page_table, lengths, out, partial, sums, scale, table_row,
    num_rows, num_parts, num_heads,
    ROWS: gl.constexpr, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One part of all rows' tokens, up to 32 heads."""
    if DEPENDENT:
        gdc_launch_dependents()
    part = gl.program_id(0)
    plan = _plan(lengths, num_rows, part, num_parts, ROWS, TOKENS, WARPS)
    queries, ring = _places((q_half, q_rope), HEADS, 1)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEADS], q_half.dtype)
    weights = gl.allocate_shared_memory(q_half.dtype, [TOKENS, HEADS], layout)
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
    gl.warp_specialize(
        [
            (_attend_few, (
                queries, ring, weights, plan, lengths, out, partial, sums, scale, part, num_parts,
                num_heads, HEADS, WARPS,
            )),
            (_copy, (
                (q_half, q_rope), (half, rope), queries, ring, plan, lengths, page_table,
                table_row, num_heads, 0, 1, PAGE_SIZE, COPIED,
            )),
        ],
        [1], [FEW_COPY_REGISTERS],
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_row", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _many(
    q_half, q_rope, half, rope, page_table, lengths, out, partial, sums, scale, table_row,
    num_rows, num_parts, num_heads,
    ROWS: gl.constexpr, BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One part of all rows' tokens, 64 heads. Programs of the same part are neighbours: what one
    reads is in the cache for the other."""
    if DEPENDENT:
        gdc_launch_dependents()
    part = gl.program_id(0) // BLOCKS
    first_head = gl.program_id(0) % BLOCKS * MANY
    plan = _plan(lengths, num_rows, part, num_parts, ROWS, 2 * TOKENS, 4)
    queries, ring = _places((q_half, q_rope), MANY, 2)
    tops = gl.allocate_shared_memory(gl.float32, [4, MANY], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tops_ready, weights_ready = _barriers(2, 1), _barriers(2, 1)
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
    gl.warp_specialize(
        [
            (_attend_many, (
                queries, ring, ring[0], tops, tops_ready, weights_ready, plan, lengths, out,
                partial, sums, scale, part, num_parts, num_heads, first_head, 0,
            )),
            (_attend_many, (
                queries, ring, ring[1], tops, tops_ready, weights_ready, plan, lengths, out,
                partial, sums, scale, part, num_parts, num_heads, first_head, 1,
            )),
            (_copy, (
                (q_half, q_rope), (half, rope), queries, ring, plan, lengths, page_table,
                table_row, num_heads, first_head, 2, PAGE_SIZE, COPIED,
            )),
        ],
        [4, 1], [MANY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@triton.jit
def _merge(
    lengths, partial, sums, out, num_rows, num_parts, num_heads,
    ROWS: tl.constexpr, UNIT: tl.constexpr, LATENT: tl.constexpr, HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A row's parts into one, of some heads; zeros of a row without tokens."""
    let_next_begin(DEPENDENT)
    row = tl.program_id(1)
    r = tl.arange(0, ROWS)
    units = (tl.load(lengths + r, mask=r < num_rows, other=0) + UNIT - 1) // UNIT
    quota = _quota_in_triton(tl.sum(units, 0), tl.max(units, 0), num_parts)
    begin = tl.sum(tl.where(r < row, units, 0), 0)
    count = tl.sum(tl.where(r == row, units, 0), 0)
    first, last = begin // quota, (begin + count - 1) // quota
    wait_for_inputs(DEPENDENT)
    if (count > 0) & (first == last):
        return
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, LATENT)
    ok = h < num_heads
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, LATENT), tl.float32)
    if count > 0:
        for part in range(first, last + 1):
            slot = tl.where(part == first, num_parts + part, part)
            size = tl.load(sums + slot * num_heads + h, mask=ok, other=0.0)
            to = (slot * num_heads + h)[:, None] * LATENT + d[None, :]
            value = tl.load(partial + to, mask=ok[:, None], other=0.0)
            higher = tl.maximum(best, size)
            shrink, weight = tl.exp2(best - higher), tl.exp2(size - higher)
            mixed = mixed * shrink[:, None] + value * weight[:, None]
            total = total * shrink + weight
            best = higher
        mixed = mixed / total[:, None]
    to = (row.to(tl.int64) * num_heads + h)[:, None] * LATENT + d[None, :]
    tl.store(out + to, mixed, mask=ok[:, None])


@lru_cache(maxsize=8)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_for(queries: Tensor, pages: Tensor, latent: int) -> bool:
    """Whether this kernel takes such queries and pages: bfloat16, 512 and 64 numbers, pages that
    fill tiles."""
    num_rows, _, width = queries.shape
    return (
        is_hopper(queries.device)
        and queries.dtype == pages.dtype == torch.bfloat16
        and (latent, width) == (LATENT, LATENT + ROPE)
        and (pages.shape[1] in (16, 32) or pages.shape[1] % TOKENS.value == 0)
        and num_rows <= MAX_ROWS
        and queries.is_contiguous()
    )


def latent_decode(
    queries: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float, latent: int
) -> Tensor:
    """Attended latents [rows, heads, latent] of queries [rows, heads, latent + rope]."""
    num_rows, num_heads, _ = queries.shape
    is_few = num_heads <= FEW_HEADS
    blocks = 1 if is_few else -(-num_heads // MANY.value)
    num_parts = max(1, _num_multiprocessors(queries.device) // blocks)
    heads = max(16, triton.next_power_of_2(num_heads)) if is_few else MANY.value
    out = torch.empty(num_rows, num_heads, latent, dtype=queries.dtype, device=queries.device)
    # Not `scratch`: a captured graph keeps what it allocated, and a buffer that grows would not.
    partial = torch.empty(
        2 * num_parts, num_heads, latent, dtype=torch.float32, device=queries.device
    )
    sums = torch.empty(2 * num_parts, num_heads, dtype=torch.float32, device=queries.device)
    rows = max(32, triton.next_power_of_2(num_rows))
    page_size = pages.shape[1]
    copied = min(page_size, TOKENS.value)
    options = launch_options(queries.device)
    arguments = (
        *descriptors(queries, pages, heads, copied), page_table, lengths, out, partial, sums,
        scale * LOG2_E, page_table.stride(0), num_rows, num_parts, num_heads,
    )  # fmt: skip
    sizes = {"ROWS": rows, "PAGE_SIZE": page_size, "COPIED": copied, **options}
    if is_few:
        _few[(num_parts,)](*arguments, HEADS=heads, WARPS=FEW_WARPS, num_warps=FEW_WARPS, **sizes)
    else:
        _many[(num_parts * blocks,)](*arguments, BLOCKS=blocks, num_warps=4, **sizes)
    unit = TOKENS.value if is_few else 2 * TOKENS.value
    merged = 4
    _merge[(-(-num_heads // merged), num_rows)](
        lengths, partial, sums, out, num_rows, num_parts, num_heads, ROWS=rows, UNIT=unit,
        LATENT=latent, HEADS=merged, num_warps=4, **options,
    )  # fmt: skip
    return out


def descriptors(queries: Tensor, pages: Tensor, heads: int, copied: int) -> list[object]:
    """What the copy engine is told of queries and pages: their shapes, and boxes of half a latent
    and of the rotated part."""
    num_rows, num_heads, width = queries.shape
    num_pages, page_size, _ = pages.shape
    found: list[object] = []
    for columns in (HALF.value, ROPE):
        shape, strides = [num_rows * num_heads, width], [width, 1]
        found.append(_describe(queries, shape, strides, (heads, columns)))
    for columns in (HALF.value, ROPE):
        shape, strides = [num_pages, page_size, width], [pages.stride(0), pages.stride(1), 1]
        found.append(_describe(pages, shape, strides, (1, copied, columns)))
    return found


def _describe(
    base: Tensor, shape: list[int], strides: list[int], box: tuple[int, ...]
) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, list(box), _layout(box))


@lru_cache(maxsize=32)
def _layout(box: tuple[int, ...]) -> object:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
