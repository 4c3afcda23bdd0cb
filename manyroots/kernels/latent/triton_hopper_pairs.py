"""Latent decode on Hopper GPUs for many heads, in Gluon: two tiles of tokens at a time.

Takes 64 heads a program and divides the rows' tokens as `triton_hopper.py` does, in pairs of tiles.
Twice four warps compute. The first four have the scores of a pair's first tile, the others those of
its second. Each tile's weights go through shared memory, because the first four warps add the left
half of all values and the others the right half. So no instruction computes a half of 64 rows'
scores, and one tile's softmax runs beside the other's products.

Four warps start copies. Each has a part of the tiles with its own barriers, so that a part is
loaded again as soon as its last reader is done:

    part            readers that release it
    left of first   first warps, after the first tile's values
    right of first  second warps; with the first tile's rotated part, which its weights replace
    left of second  first warps; with the second tile's rotated part
    right of second second warps

Weights are relative to the greatest score so far. The first warps take the one of the pair before,
then the second warps take theirs; after that the first tile's weights are adapted to both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from manyroots.kernels.latent.triton_hopper_tiles import (
    HALF,
    ROPE_DIM,
    TOKENS,
    barriers,
    clear_after,
    load_box,
    look_up,
    plan_of,
)

HEADS = gl.constexpr(64)
PAIR = gl.constexpr(2 * 64)
"""Tokens of a pair of tiles."""
COMPUTE_REGISTERS = gl.constexpr(232)
COPY_REGISTERS = gl.constexpr(40)
FIRST_LEFT, FIRST_RIGHT = gl.constexpr(0), gl.constexpr(1)
SECOND_LEFT, SECOND_RIGHT = gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def _copy(given, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr, PART: gl.constexpr):
    """The role of one warp: load one part of the pairs; the first warp also loads queries."""
    q_descs, descs, queries, ring, plan, lengths, page_table, table_row, num_heads, first_head = (
        given
    )
    half_desc, rope_desc = descs
    tile: gl.constexpr = PART // 2
    has_rope: gl.constexpr = (PART == FIRST_RIGHT) | (PART == SECOND_LEFT)
    copies: gl.constexpr = TOKENS // COPIED
    num_bytes: gl.constexpr = copies * (
        half_desc.block_type.nbytes + (rope_desc.block_type.nbytes if has_rope else 0)
    )
    column: gl.constexpr = PART % 2 * HALF
    full, empty = ring[2].index(PART), ring[3].index(PART)
    to, rope_to = ring[PART % 2].index(tile), ring[4].index(tile)
    row, unit, num_left = plan
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        count = gl.minimum(gl.cdiv(length, PAIR) - unit, num_left)
        if count > 0:
            table = page_table + row.to(gl.int64) * table_row
            last_page = (length - 1) // PAGE_SIZE
            first = unit * PAIR + tile * TOKENS
            pages = look_up(table, first, last_page, PAGE_SIZE, COPIED)
            for i in range(count):
                # The next pages' numbers are on their way while this warp waits.
                ahead = look_up(table, first + PAIR, last_page, PAGE_SIZE, COPIED)
                mbarrier.wait(empty, (at + i & 1) ^ 1)
                mbarrier.expect(full, num_bytes)
                for j in gl.static_range(copies):
                    offset = (first + j * COPIED) % PAGE_SIZE
                    load_box(
                        half_desc, [pages[j], offset, column], full, to.slice(j * COPIED, COPIED)
                    )
                    if has_rope:
                        load_box(
                            rope_desc, [pages[j], offset, 2 * HALF], full,
                            rope_to.slice(j * COPIED, COPIED),
                        )  # fmt: skip
                if PART == FIRST_LEFT:
                    if i == 0:  # after the tile: the last row may still use its queries
                        half, rope = q_descs
                        mbarrier.wait(queries[4], (asked & 1) ^ 1)
                        mbarrier.expect(
                            queries[3], 2 * half.block_type.nbytes + rope.block_type.nbytes
                        )
                        q_row = row * num_heads + first_head
                        load_box(half, [q_row, 0], queries[3], queries[0].index(0))
                        load_box(half, [q_row, HALF], queries[3], queries[1].index(0))
                        load_box(rope, [q_row, 2 * HALF], queries[3], queries[2].index(0))
                pages = ahead
                first += PAIR
            asked += 1
            at += count
        num_left -= count
        row += 1
        unit = 0


@gluon.jit
def _zero(at):
    """Zero, which the compiler does not know. It would compute the addresses of all operands before
    the loop and keep them in memory, because registers do not hold them."""
    return at >> 31


@gluon.jit
def _scores(queries, ring, at, TILE: gl.constexpr):
    """Of 64 heads and a tile, when its parts are loaded: three products. Each tile begins with the
    part that is released first."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    early: gl.constexpr = FIRST_LEFT if TILE == 0 else SECOND_RIGHT
    late: gl.constexpr = FIRST_RIGHT if TILE == 0 else SECOND_LEFT
    zero = _zero(at)
    tile = TILE + zero
    scores = gl.zeros([HEADS, TOKENS], gl.float32, s_layout)
    mbarrier.wait(ring[2].index(early), at & 1)
    part, query = ring[early % 2].index(tile), queries[early % 2].index(zero)
    scores = warpgroup_mma(query, part.permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(ring[2].index(late), at & 1)
    part, query = ring[late % 2].index(tile), queries[late % 2].index(zero)
    scores = warpgroup_mma(query, part.permute((1, 0)), scores, is_async=True)
    rope, query = ring[4].index(tile), queries[2].index(zero)
    scores = warpgroup_mma(query, rope.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _hidden(scores, first, length):
    """Scores without those after the last token."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    t = first + gl.arange(0, TOKENS, gl.SliceLayout(0, s_layout))
    return gl.where((t < length)[None, :], scores, float("-inf"))


@gluon.jit
def _first_step(
    queries, ring, shared, at, first, length, scale, best, total, acc, IS_LAST: gl.constexpr
):  # fmt: skip
    """A pair, for the first warps: the first tile's weights and the left half of values."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    tops, bars = shared
    dtype: gl.constexpr = queries[0].dtype
    phase = at & 1
    scores = _scores(queries, ring, at, 0)
    if IS_LAST:
        scores = _hidden(scores, first, length)
    top = gl.maximum(best, gl.max(scores, 1) * scale)
    tops.index(0).store(top)
    mbarrier.arrive(bars.index(0))
    shrink = gl.exp2(best - top)
    weights = gl.exp2(scores * scale - top[:, None])
    total = total * shrink + gl.sum(weights, 1)
    own = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc *= gl.convert_layout(shrink, o_rows)[:, None]
    zero = _zero(at)
    left = ring[0].index(zero)
    if IS_LAST:
        if first + TOKENS > length:
            clear_after(left, first, length, 4)
    acc = warpgroup_mma(own, left, acc, is_async=True)
    mbarrier.wait(bars.index(1), phase)
    best = tops.index(1).load(s_rows)
    again = gl.exp2(top - best)
    ring[4].index(0).store((weights * again[:, None]).to(dtype))
    fence_async_shared()
    mbarrier.arrive(bars.index(2))
    acc, own = warpgroup_mma_wait(0, deps=(acc, own))
    mbarrier.arrive(ring[3].index(FIRST_LEFT))
    total *= again
    acc *= gl.convert_layout(again, o_rows)[:, None]
    left = ring[0].index(1 + zero)
    mbarrier.wait(bars.index(3), phase)
    mbarrier.wait(ring[2].index(SECOND_LEFT), phase)
    if IS_LAST:
        if first + PAIR > length:
            clear_after(left, first + TOKENS, length, 4)
    acc = warpgroup_mma(ring[4].index(1 + zero), left, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(ring[3].index(SECOND_LEFT))
    return best, total, acc


@gluon.jit
def _second_step(
    queries, ring, shared, at, first, length, scale, best, total, acc, IS_LAST: gl.constexpr
):  # fmt: skip
    """A pair, for the second warps: the second tile's weights and the right half of values."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    tops, bars = shared
    dtype: gl.constexpr = queries[0].dtype
    phase = at & 1
    scores = _scores(queries, ring, at, 1)
    if IS_LAST:
        scores = _hidden(scores, first + TOKENS, length)
    top = gl.max(scores, 1) * scale
    mbarrier.wait(bars.index(0), phase)
    top = gl.maximum(top, tops.index(0).load(s_rows))
    tops.index(1).store(top)
    mbarrier.arrive(bars.index(1))
    shrink = gl.exp2(best - top)
    weights = gl.exp2(scores * scale - top[:, None])
    total = total * shrink + gl.sum(weights, 1)
    ring[4].index(1).store(weights.to(dtype))
    fence_async_shared()
    mbarrier.arrive(bars.index(3))
    own = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
    acc *= gl.convert_layout(shrink, o_rows)[:, None]
    mbarrier.wait(bars.index(2), phase)
    mbarrier.wait(ring[2].index(FIRST_RIGHT), phase)
    zero = _zero(at)
    right, last = ring[1].index(zero), ring[1].index(1 + zero)
    if IS_LAST:
        if first + TOKENS > length:
            clear_after(right, first, length, 4)
        if first + PAIR > length:
            clear_after(last, first + TOKENS, length, 4)
    acc = warpgroup_mma(ring[4].index(zero), right, acc, is_async=True)
    acc = warpgroup_mma(own, last, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    mbarrier.arrive(ring[3].index(FIRST_RIGHT))
    acc, own = warpgroup_mma_wait(0, deps=(acc, own))
    mbarrier.arrive(ring[3].index(SECOND_RIGHT))
    return top, total, acc


@gluon.jit
def _step(
    queries, ring, shared, at, first, length, scale, best, total, acc, SIDE: gl.constexpr,
    IS_LAST: gl.constexpr,
):  # fmt: skip
    if SIDE == 0:
        best, total, acc = _first_step(
            queries, ring, shared, at, first, length, scale, best, total, acc, IS_LAST
        )
    else:
        best, total, acc = _second_step(
            queries, ring, shared, at, first, length, scale, best, total, acc, IS_LAST
        )
    return best, total, acc


@gluon.jit
def _attend(given, SIDE: gl.constexpr):
    """The role of four computing warps: half of the values of all pairs of a part."""
    (
        queries, ring, shared, totals, plan, lengths, out, partial, sums, scale, part, num_parts,
        num_heads, first_head,
    ) = given  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    row, unit, num_left = plan
    at, asked = 0, 0
    while num_left > 0:
        length = gl.load(lengths + row)
        num_units = gl.cdiv(length, PAIR)
        count = gl.minimum(num_units - unit, num_left)
        if count > 0:
            best = gl.full([HEADS], float("-inf"), gl.float32, s_rows)
            total = gl.zeros([HEADS], gl.float32, s_rows)
            acc = gl.zeros([HEADS, HALF], gl.float32, o_layout)
            mbarrier.wait(queries[3], asked & 1)
            for i in range(count - 1):
                best, total, acc = _step(
                    queries, ring, shared, at + i, (unit + i) * PAIR, length, scale, best, total,
                    acc, SIDE, False,
                )  # fmt: skip
            best, total, acc = _step(
                queries, ring, shared, at + count - 1, (unit + count - 1) * PAIR, length, scale,
                best, total, acc, SIDE, True,
            )  # fmt: skip
            mbarrier.arrive(queries[4])
            sums_at, ready = totals
            sums_at.index(SIDE).store(total)
            mbarrier.arrive(ready.index(SIDE))
            mbarrier.wait(ready.index(1 - SIDE), asked & 1)
            total += sums_at.index(1 - SIDE).load(s_rows)
            acc *= gl.convert_layout(1.0 / total, o_rows)[:, None]
            h = first_head + gl.arange(0, HEADS, o_rows)
            d = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
            to = (h * (2 * HALF))[:, None] + d[None, :]
            ok = (h < num_heads)[:, None]
            if (unit == 0) & (count == num_units):
                to += row * num_heads * (2 * HALF)
                gl.store(out + to, acc.to(out.dtype.element_ty), mask=ok)
            else:
                slot = gl.where(unit == 0, num_parts + part, part)
                to += slot * num_heads * (2 * HALF)
                gl.store(partial + to, acc, mask=ok)
                if SIDE == 0:
                    g = first_head + gl.arange(0, HEADS, s_rows)
                    gl.store(sums + slot * num_heads + g, best + gl.log2(total), mask=g < num_heads)
            asked += 1
            at += count
        num_left -= count
        row += 1
        unit = 0


@gluon.jit(
    do_not_specialize=["table_row", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["page_table", "lengths"],
)
def decode_pairs(
    q_half, q_rope, half, rope, page_table, lengths, out, partial, sums, scale, table_row,
    num_rows, num_parts, num_heads,
    BLOCKS: gl.constexpr, PAGE_SIZE: gl.constexpr, COPIED: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One part of all rows' tokens, for 64 heads."""
    if DEPENDENT:
        gdc_launch_dependents()
    part = gl.program_id(0) // BLOCKS
    first_head = gl.program_id(0) % BLOCKS * HEADS
    plan = plan_of(lengths, num_rows, part, num_parts, PAIR, 4)
    dtype: gl.constexpr = q_half.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, ROPE_DIM], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = (
        gl.allocate_shared_memory(dtype, [1, HEADS, HALF], q_half.layout),
        gl.allocate_shared_memory(dtype, [1, HEADS, HALF], q_half.layout),
        gl.allocate_shared_memory(dtype, [1, HEADS, ROPE_DIM], q_rope.layout),
        barriers(1, 1).index(0), barriers(1, 2).index(0),
    )  # fmt: skip
    # Left and right halves of both tiles, barriers for 'full' and 'readers done' of the four parts,
    # and the rotated parts, which the tiles' weights replace.
    ring = (
        gl.allocate_shared_memory(dtype, [2, TOKENS, HALF], wide),
        gl.allocate_shared_memory(dtype, [2, TOKENS, HALF], wide),
        barriers(4, 1), barriers(4, 1),
        gl.allocate_shared_memory(dtype, [2, TOKENS, ROPE_DIM], narrow),
    )  # fmt: skip
    # Greatest scores of either warps; barriers for these, and for the weights of either tile.
    shared = (gl.allocate_shared_memory(gl.float32, [2, HEADS], flat), barriers(4, 1))
    totals = (gl.allocate_shared_memory(gl.float32, [2, HEADS], flat), barriers(2, 1))
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
    attending = (
        queries, ring, shared, totals, plan, lengths, out, partial, sums, scale, part, num_parts,
        num_heads, first_head,
    )  # fmt: skip
    copying = (
        (q_half, q_rope), (half, rope), queries, ring, plan, lengths, page_table, table_row,
        num_heads, first_head,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (attending, 0)),
            (_attend, (attending, 1)),
            (_copy, (copying, PAGE_SIZE, COPIED, 0)),
            (_copy, (copying, PAGE_SIZE, COPIED, 1)),
            (_copy, (copying, PAGE_SIZE, COPIED, 2)),
            (_copy, (copying, PAGE_SIZE, COPIED, 3)),
        ],
        [4, 1, 1, 1, 1],
        [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
