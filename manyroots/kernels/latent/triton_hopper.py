"""Latent decode on Hopper GPUs, in Gluon: each latent is read once and used as key and as value.

Same signature as `reference.py`, for inputs that `is_for` accepts; `triton_decode.py` takes the
rest. All rows' tiles of tokens form one list. Each program takes an equal range of it, so the work
follows the lengths while the launch grid is fixed. A second launch merges rows that several
programs share. A program has four warps that start copies of pages, and:

    up to 16 heads   4 warps; tokens are the rows of the matrix instructions, heads the columns,
                     so that no instruction computes heads that do not exist
    up to 32 heads   8 warps; the registers of 4 do not hold so many sums
    more heads       8 warps for 64 heads, which are the rows; with many rows, the program of
                     `triton_hopper_pairs.py`

A tile's scores are multiplied right after the values of the previous tile, so that matrix
instructions wait only for weights. Scores are in units of log2, because the chip computes exp2.
Whole pages are read; the part of the last page after the last token is cleared before it is used as
a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manyroots.kernels.latent.triton_hopper_pairs import HEADS as PAIRED_HEADS
from manyroots.kernels.latent.triton_hopper_pairs import PAIR, decode_pairs
from manyroots.kernels.latent.triton_hopper_tiles import (
    HALF,
    LATENT,
    ROPE,
    ROPE_DIM,
    ROWS_AT_ONCE,
    TOKENS,
    barriers,
    clear_after,
    load_box,
    look_up,
    plan_of,
    quota_in_triton,
)
from manyroots.kernels.launch import (
    is_hopper,
    launch_options,
    let_next_begin,
    wait_for_inputs,
)

LOG2_E = math.log2(math.e)
STAGES = gl.constexpr(2)
"""Tiles that are loaded or being loaded; shared memory holds no more."""
FEW_HEADS, MANY_HEADS = 32, 64
"""Heads of a program."""
FEWEST_HEADS = 16
FEW_WARPS, MANY_WARPS = 4, 8
COPIERS = gl.constexpr(4)
"""Roles of one warp that share the boxes of a tile: issuing a copy takes longer than the copy, and
the warps of one role would wait for each other after each box."""
COPY_REGISTERS = gl.constexpr(40)
"""Registers of a thread."""
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class DecodeWay:
    """How the kernels divide a step's work."""

    heads: int
    """Of a program."""
    in_pairs: bool = False
    """Two tiles at a time, as `triton_hopper_pairs.py` does."""
    merged_heads: int = 1
    """Heads of a program of the second launch."""
    merged_parts: int = 16
    """Parts that it adds at once."""

    @property
    def unit(self) -> int:
        """Tokens of what parts are counted in."""
        return int(PAIR.value if self.in_pairs else TOKENS.value)


def way_for(num_rows: int, num_heads: int, num_multiprocessors: int) -> DecodeWay:
    """The faster way, as far as it was measured. Many heads take pairs of tiles if there is a row
    for every second part at least: with few tokens in a part, a tile at a time begins sooner."""
    if num_heads <= FEW_HEADS:
        return DecodeWay(max(FEWEST_HEADS, triton.next_power_of_2(num_heads)))
    num_parts = num_multiprocessors // -(-num_heads // MANY_HEADS)
    return DecodeWay(MANY_HEADS, in_pairs=2 * num_rows >= num_parts, merged_heads=4, merged_parts=2)


@gluon.jit
def _ask_for_tile(
    descs, ring, at, pages, first,
    PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr, COPIER: gl.constexpr,
):  # fmt: skip
    """Copy one warp's share of a tile's boxes into the ring as number `at`, as soon as its slot is
    free."""
    half_desc, rope_desc = descs
    full, empty = ring[3], ring[4]
    stage = at % STAGES
    copies: gl.constexpr = TOKENS // COPIED
    halves: gl.constexpr = (2 * copies - COPIER + COPIERS - 1) // COPIERS
    before: gl.constexpr = (COPIER + COPIERS - 2) % COPIERS
    ropes: gl.constexpr = (copies - before + COPIERS - 1) // COPIERS
    mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, halves * half_desc.block_type.nbytes + ropes * rope_desc.block_type.nbytes)
    for j in gl.static_range(copies):
        offset = (first + j * COPIED) % PAGE_SIZE
        for p in gl.static_range(3):
            if (j + 2 if p == 2 else 2 * j + p) % COPIERS == COPIER:
                load_box(
                    rope_desc if p == 2 else half_desc, [pages[j], offset, p * HALF], bar,
                    ring[p].index(stage).slice(j * COPIED, COPIED),
                )  # fmt: skip


@gluon.jit
def _copy(given, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr, COPIER: gl.constexpr):
    """The role of one warp: load a share of all tiles; the first warp also loads queries."""
    q_descs, descs, queries, ring, plan, lengths, page_table, table_row, num_heads, first_head = (
        given
    )
    row, tile, num_left = plan
    q_left, q_right, q_rope, q_full, q_empty = queries
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        count = gl.minimum(gl.cdiv(length, TOKENS) - tile, num_left)
        if count > 0:
            table = page_table + row.to(gl.int64) * table_row
            last_page = (length - 1) // PAGE_SIZE
            first = tile * TOKENS
            pages = look_up(table, first, last_page, PAGE_SIZE, COPIED)
            for i in range(count):
                # The next tile's pages are looked up while this one waits for its slot.
                ahead = look_up(table, first + TOKENS, last_page, PAGE_SIZE, COPIED)
                _ask_for_tile(descs, ring, at + i, pages, first, PAGE_SIZE, COPIED, COPIER)
                if COPIER == 0:
                    if i == 0:  # after the tile: the last row may still use its queries
                        half, rope = q_descs
                        mbarrier.wait(q_empty, (asked & 1) ^ 1)
                        mbarrier.expect(q_full, 2 * half.block_type.nbytes + rope.block_type.nbytes)
                        q_row = row * num_heads + first_head
                        load_box(half, [q_row, 0], q_full, q_left)
                        load_box(half, [q_row, HALF], q_full, q_right)
                        load_box(rope, [q_row, 2 * HALF], q_full, q_rope)
                pages = ahead
                first += TOKENS
            asked += 1
            at += count
        num_left -= count
        row += 1
        tile = 0


@gluon.jit
def _score(queries, ring, at, HEADS: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """Start a tile's scores when it is loaded: three products. Tokens are along `AXIS`."""
    full = ring[3]
    stage = at % STAGES
    mbarrier.wait(full.index(stage), at // STAGES & 1)
    if AXIS == 0:
        scores = gl.zeros([TOKENS, HEADS], gl.float32, layout)
    else:
        scores = gl.zeros([HEADS, TOKENS], gl.float32, layout)
    for p in gl.static_range(3):
        tile, query = ring[p].index(stage), queries[p]
        if AXIS == 0:
            scores = warpgroup_mma(
                tile, query.permute((1, 0)), scores, use_acc=p > 0, is_async=True
            )
        else:
            scores = warpgroup_mma(
                query, tile.permute((1, 0)), scores, use_acc=p > 0, is_async=True
            )
    return scores


@gluon.jit
def _take_in(
    scores, ring, stage, weights_at, first, length, scale, best, totals, acc_left, acc_right,
    IS_LAST: gl.constexpr, AXIS: gl.constexpr, WARPS: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Turn a tile's scores into weights and start adding its values: two products. The last tile
    may have fewer tokens."""
    left, right = ring[0].index(stage), ring[1].index(stage)
    if IS_LAST:
        t = first + gl.arange(0, TOKENS, gl.SliceLayout(1 - AXIS, s_layout))
        scores = gl.where(gl.expand_dims(t < length, 1 - AXIS), scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, AXIS) * scale)
    shrink = gl.exp2(best - higher)
    weights = gl.exp2(scores * scale - gl.expand_dims(higher, AXIS))
    totals = totals * gl.expand_dims(shrink, AXIS) + weights
    weights_at.store(weights.to(left.dtype))
    fence_async_shared()
    if IS_LAST:
        if first + TOKENS > length:
            clear_after(left, first, length, WARPS)
            clear_after(right, first, length, WARPS)
    factor = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(AXIS, o_layout)), AXIS)
    acc_left *= factor
    acc_right *= factor
    if AXIS == 0:
        acc_left = warpgroup_mma(left.permute((1, 0)), weights_at, acc_left, is_async=True)
        acc_right = warpgroup_mma(right.permute((1, 0)), weights_at, acc_right, is_async=True)
    else:
        acc_left = warpgroup_mma(weights_at, left, acc_left, is_async=True)
        acc_right = warpgroup_mma(weights_at, right, acc_right, is_async=True)
    return higher, totals, acc_left, acc_right


@gluon.jit
def _weights_at(weights, ring, stage, AXIS: gl.constexpr):
    """Buffer of a tile's weights; with many heads, they reuse the space of its rotated part."""
    return weights if AXIS == 0 else ring[2].index(stage)


@gluon.jit
def _attend(
    queries, ring, weights, plan, lengths, out, partial, sums, scale, part, num_parts, num_heads,
    first_head, HEADS: gl.constexpr, AXIS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The role of the other warps: attend to all tokens of a part."""
    wide: gl.constexpr = HEADS if AXIS == 0 else TOKENS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, wide * 4 // WARPS, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1] if AXIS == 0 else [4, WARPS // 4],
        [16, HEADS if AXIS == 0 else HALF * 4 // WARPS, 16],
    )  # fmt: skip
    q_full, q_empty, empty = queries[3], queries[4], ring[4]
    row, tile, num_left = plan
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        num_tiles = gl.cdiv(length, TOKENS)
        count = gl.minimum(num_tiles - tile, num_left)
        if count > 0:
            best = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(AXIS, s_layout))
            if AXIS == 0:
                totals = gl.zeros([TOKENS, HEADS], gl.float32, s_layout)
                acc_left = gl.zeros([HALF, HEADS], gl.float32, o_layout)
                acc_right = gl.zeros([HALF, HEADS], gl.float32, o_layout)
            else:
                totals = gl.zeros([HEADS, TOKENS], gl.float32, s_layout)
                acc_left = gl.zeros([HEADS, HALF], gl.float32, o_layout)
                acc_right = gl.zeros([HEADS, HALF], gl.float32, o_layout)
            mbarrier.wait(q_full, asked & 1)
            scores = _score(queries, ring, at, HEADS, AXIS, s_layout)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            for i in range(count - 1):
                stage = (at + i) % STAGES
                best, totals, acc_left, acc_right = _take_in(
                    scores, ring, stage, _weights_at(weights, ring, stage, AXIS),
                    (tile + i) * TOKENS, length, scale, best, totals, acc_left, acc_right, False,
                    AXIS, WARPS, s_layout, o_layout,
                )  # fmt: skip
                # The next tile's scores start at once, before this tile's values are done.
                ahead = _score(queries, ring, at + i + 1, HEADS, AXIS, s_layout)
                acc_left, acc_right = warpgroup_mma_wait(3, deps=(acc_left, acc_right))
                mbarrier.arrive(empty.index(stage))
                scores = warpgroup_mma_wait(0, deps=(ahead,))
            mbarrier.arrive(q_empty)
            stage = (at + count - 1) % STAGES
            best, totals, acc_left, acc_right = _take_in(
                scores, ring, stage, _weights_at(weights, ring, stage, AXIS),
                (tile + count - 1) * TOKENS, length, scale, best, totals, acc_left, acc_right, True,
                AXIS, WARPS, s_layout, o_layout,
            )  # fmt: skip
            acc_left, acc_right = warpgroup_mma_wait(0, deps=(acc_left, acc_right))
            mbarrier.arrive(empty.index(stage))
            total = gl.sum(totals, AXIS)
            factor = gl.convert_layout(1.0 / total, gl.SliceLayout(AXIS, o_layout))
            factor = gl.expand_dims(factor, AXIS)
            h = first_head + gl.arange(0, HEADS, gl.SliceLayout(AXIS, o_layout))
            d = gl.arange(0, HALF, gl.SliceLayout(1 - AXIS, o_layout))
            to = gl.expand_dims(h * (2 * HALF), AXIS) + gl.expand_dims(d, 1 - AXIS)
            ok = gl.expand_dims(h < num_heads, AXIS)
            if (tile == 0) & (count == num_tiles):
                to += row * num_heads * (2 * HALF)
                gl.store(out + to, (acc_left * factor).to(out.dtype.element_ty), mask=ok)
                gl.store(out + to + HALF, (acc_right * factor).to(out.dtype.element_ty), mask=ok)
            else:
                slot = gl.where(tile == 0, num_parts + part, part)
                to += slot * num_heads * (2 * HALF)
                gl.store(partial + to, acc_left * factor, mask=ok)
                gl.store(partial + to + HALF, acc_right * factor, mask=ok)
                g = first_head + gl.arange(0, HEADS, gl.SliceLayout(AXIS, s_layout))
                gl.store(sums + slot * num_heads + g, best + gl.log2(total), mask=g < num_heads)
            asked += 1
            at += count
        num_left -= count
        row += 1
        tile = 0


@gluon.jit
def _places(q_descs, HEADS: gl.constexpr):
    """Shared memory of queries and of the ring, each with a barrier for 'full' and one for 'readers
    done'."""
    half_desc, rope_desc = q_descs
    dtype: gl.constexpr = half_desc.dtype
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HALF], dtype)
    rope: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, ROPE_DIM], dtype)
    queries = (
        gl.allocate_shared_memory(dtype, [HEADS, HALF], half_desc.layout),
        gl.allocate_shared_memory(dtype, [HEADS, HALF], half_desc.layout),
        gl.allocate_shared_memory(dtype, [HEADS, ROPE_DIM], rope_desc.layout),
        barriers(1, 1).index(0), barriers(1, 1).index(0),
    )  # fmt: skip
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, HALF], half),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, HALF], half),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, ROPE_DIM], rope),
        barriers(STAGES, COPIERS), barriers(STAGES, 1),
    )  # fmt: skip
    return queries, ring


@gluon.jit(
    do_not_specialize=["table_row", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def _decode(
    q_half, q_rope, half, rope, page_table, lengths, out, partial, sums, scale, table_row, num_rows,
    num_parts, num_heads,
    HEADS: gl.constexpr, BLOCKS: gl.constexpr, AXIS: gl.constexpr,
    PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One part of all rows' tokens, for a block of heads. Programs of the same part are neighbours,
    so one finds the other's reads in the cache."""
    if DEPENDENT:
        gdc_launch_dependents()
    part = gl.program_id(0) // BLOCKS
    first_head = gl.program_id(0) % BLOCKS * HEADS
    plan = plan_of(lengths, num_rows, part, num_parts, TOKENS, WARPS)
    queries, ring = _places((q_half, q_rope), HEADS)
    weights = ring[2]
    if AXIS == 0:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HEADS], q_half.dtype)
        weights = gl.allocate_shared_memory(q_half.dtype, [TOKENS, HEADS], layout)
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
    given = (
        (q_half, q_rope), (half, rope), queries, ring, plan, lengths, page_table, table_row,
        num_heads, first_head,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (
                queries, ring, weights, plan, lengths, out, partial, sums, scale, part, num_parts,
                num_heads, first_head, HEADS, AXIS, WARPS,
            )),
            (_copy, (given, PAGE_SIZE, COPIED, 0)),
            (_copy, (given, PAGE_SIZE, COPIED, 1)),
            (_copy, (given, PAGE_SIZE, COPIED, 2)),
            (_copy, (given, PAGE_SIZE, COPIED, 3)),
        ],
        [1, 1, 1, 1], [COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _merge(
    lengths, partial, sums, out, num_rows, num_parts, num_heads,
    UNIT: tl.constexpr, LATENT: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge a row's parts for some heads; a row without tokens gives zeros."""
    let_next_begin(DEPENDENT)
    row = tl.program_id(1)
    total, longest, begin = 0, 0, 0
    for start in range(0, num_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        units = (tl.load(lengths + r, mask=r < num_rows, other=0) + UNIT - 1) // UNIT
        total += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
        begin += tl.sum(tl.where(r < row, units, 0), 0)
    quota = quota_in_triton(total, longest, num_parts)
    count = (tl.load(lengths + row) + UNIT - 1) // UNIT
    first, last = begin // quota, (begin + count - 1) // quota
    wait_for_inputs(DEPENDENT)
    if (count > 0) & (first == last):
        return
    h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, LATENT)
    is_head = h < num_heads
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, LATENT), tl.float32)
    if count > 0:
        for start in range(first, last + 1, PARTS):
            part = start + tl.arange(0, PARTS)
            slot = tl.where(part == first, num_parts + part, part)
            ok = (part <= last)[:, None] & is_head[None, :]
            at = slot[:, None] * num_heads + h[None, :]
            size = tl.load(sums + at, mask=ok, other=float("-inf"))
            value = tl.load(
                partial + at[:, :, None] * LATENT + d[None, None, :], mask=ok[:, :, None], other=0.0
            )
            higher = tl.maximum(best, tl.max(size, axis=0))
            higher = tl.where(is_head, higher, 0.0)
            shrink, weight = tl.exp2(best - higher), tl.exp2(size - higher[None, :])
            mixed = mixed * shrink[:, None] + tl.sum(value * weight[:, :, None], axis=0)
            total = total * shrink + tl.sum(weight, axis=0)
            best = higher
        mixed = mixed / total[:, None]
    to = (row.to(tl.int64) * num_heads + h)[:, None] * LATENT + d[None, :]
    tl.store(out + to, mixed, mask=is_head[:, None])


@lru_cache(maxsize=8)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_for(queries: Tensor, pages: Tensor, latent: int) -> bool:
    """Whether this kernel supports such queries and pages: bfloat16, 512 and 64 numbers, pages that
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
    queries: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    latent: int,
    way: DecodeWay | None = None,
) -> Tensor:
    """Attended latents [rows, heads, latent] of queries [rows, heads, latent + rope]."""
    num_rows, num_heads, _ = queries.shape
    device, page_size = queries.device, pages.shape[1]
    num_multiprocessors = _num_multiprocessors(device)
    way = way or way_for(num_rows, num_heads, num_multiprocessors)
    copied = min(page_size, TOKENS.value)
    blocks = -(-num_heads // way.heads)
    num_parts = max(1, num_multiprocessors // blocks)
    out = torch.empty(num_rows, num_heads, latent, dtype=queries.dtype, device=device)
    # Not `scratch`: a captured graph keeps its allocations, and a growing buffer would move.
    partial = torch.empty(2 * num_parts, num_heads, latent, dtype=torch.float32, device=device)
    sums = torch.empty(2 * num_parts, num_heads, dtype=torch.float32, device=device)
    options = launch_options(device)
    grid = (num_parts * blocks,)
    args = (
        *descriptors(queries, pages, way.heads, copied), page_table, lengths, out, partial, sums,
        scale * LOG2_E, page_table.stride(0), num_rows, num_parts, num_heads,
    )  # fmt: skip
    constants = {"BLOCKS": blocks, "PAGE_SIZE": page_size, "COPIED": copied}
    if way.in_pairs:
        assert way.heads == PAIRED_HEADS.value
        decode_pairs[grid](*args, **constants, num_warps=4, **options)
    else:
        warps = FEW_WARPS if way.heads == FEWEST_HEADS else MANY_WARPS
        _decode[grid](
            *args, **constants, HEADS=way.heads, AXIS=0 if way.heads <= FEW_HEADS else 1,
            WARPS=warps, num_warps=warps, **options,
        )  # fmt: skip
    _merge[(-(-num_heads // way.merged_heads), num_rows)](
        lengths, partial, sums, out, num_rows, num_parts, num_heads, UNIT=way.unit, LATENT=latent,
        HEADS=way.merged_heads, PARTS=way.merged_parts, ROWS=ROWS_AT_ONCE.value, **options,
    )  # fmt: skip
    return out


def descriptors(queries: Tensor, pages: Tensor, heads: int, copied: int) -> list[object]:
    """Tensor descriptors of queries and pages for the copy engine: shapes, and boxes of half a
    latent and of the rotated part."""
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
