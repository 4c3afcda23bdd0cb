"""Chunked prefill over pages on Hopper GPUs, in Gluon; divides the work like FlashAttention-3.

Same signature as `reference.py`, for inputs that `is_for` accepts; `triton_prefill.py` takes the
rest. A program has a block of 128 queries of one head and four parts that run concurrently:

    two warps     start copies of pages, tile by tile, into rings of shared memory; one warp loads
                  keys and one values, because issuing a copy takes longer than the copy
    twice 4 warps have 64 queries each; they compute a tile's scores while the previous tile's
                  weights are multiplied with its values, and apply softmax beside that

Tiles run from last to first, so that partly visible tiles come first. Scores are in units of log2,
because the chip computes exp2. Whole pages are read; the part of the last page after the last token
is cleared before use.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
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

from manyroots.kernels.attention.paged import QUERY_BLOCK, PrefillSegments
from manyroots.kernels.launch import is_hopper

LOG2_E = math.log2(math.e)
HALF = gl.constexpr(QUERY_BLOCK // 2)
"""Queries of four warps: one matrix instruction's rows."""
HEAD_DIM = 128
BLOCK_T = 128
"""Tokens of a tile."""
PAGE_SIZES = (16, 32, 64, 128)
STAGES = 3
"""Tiles that are loaded or being loaded."""
COMPUTE_REGISTERS = gl.constexpr(240)
COPY_REGISTERS = gl.constexpr(24)
"""Registers of a thread; together with those of the first four warps they fill a multiprocessor."""
LONG = 1536
"""This kernel is faster from this average number of queries per sequence on. On an H200, 16 prompts
of 512 tokens take 165 us here and 143 us in smaller programs. One prompt of 4096 tokens takes 267
and 299 us."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


@gluon.jit
def _look_up(table, tile, last_page, PAGE_SIZE: gl.constexpr, BLOCK_T: gl.constexpr):
    """The pages of a tile; entries past the last page repeat it."""
    pages = ()
    for j in gl.static_range(BLOCK_T // PAGE_SIZE):
        at = tile * (BLOCK_T // PAGE_SIZE) + j
        pages += (gl.load(table + gl.minimum(at, last_page)),)  # type: ignore[assignment]
    return pages


@gluon.jit
def _ask_for(
    desc, ring, at, pages, column,
    PAGE_SIZE: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a tile's pages into the ring as number `at`, as soon as its slot is free."""
    tiles, full, empty = ring
    stage = at % STAGES
    mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_T // PAGE_SIZE * desc.block_type.nbytes)
    for j in gl.static_range(BLOCK_T // PAGE_SIZE):
        _load(
            desc, [pages[j], 0, column], full.index(stage),
            tiles.index(stage).slice(j * PAGE_SIZE, PAGE_SIZE),
        )  # fmt: skip


@gluon.jit
def _find(
    item, query_blocks, query_starts, context_lens, NUM_HEADS: gl.constexpr, BLOCK_T: gl.constexpr
):  # fmt: skip
    """An item of work is a block of queries of one head. Returns the head, the sequence, the
    block's first row, its number of queries, the first query's position, and the sequence's tokens.
    Then the number of visible tiles, and of those that all queries see. Blocks of no sequence have
    no tiles."""
    head, block = item % NUM_HEADS, item // NUM_HEADS
    seq = gl.load(query_blocks + 2 * block)
    first_query = gl.load(query_blocks + 2 * block + 1)
    start = gl.load(query_starts + seq)
    num_rows = gl.load(query_starts + seq + 1) - start - first_query
    context = gl.load(context_lens + seq)
    lowest = context - num_rows
    num_tiles = gl.cdiv(gl.minimum(context, lowest + 2 * HALF), BLOCK_T)
    num_tiles = gl.where(num_rows > 0, num_tiles, 0)
    num_whole = gl.minimum((lowest + 1) // BLOCK_T, num_tiles - 1)
    return head, seq, start + first_query, num_rows, lowest, context, num_tiles, num_whole


@gluon.jit
def _nth_item(k):
    """The items of this program. Items are sorted from largest to smallest, so every second round
    runs backwards."""
    at, num_programs = gl.program_id(0), gl.num_programs(0)
    return k * num_programs + gl.where(k % 2 == 0, at, num_programs - 1 - at)


@gluon.jit
def _ask_for_queries(desc, queries, asked, row, column):
    """Copy an item's queries as soon as the last item's queries are no longer in use."""
    places, full, empty = queries
    for half in gl.static_range(2):
        mbarrier.wait(empty.index(half), (asked & 1) ^ 1)
        mbarrier.expect(full.index(half), desc.block_type.nbytes)
        _load(desc, [row + half * HALF, column], full.index(half), places.index(half))


@gluon.jit
def _copy(
    q_desc, desc, queries, ring, work, page_table, table_row, num_items,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, WITH_QUERIES: gl.constexpr,
):  # fmt: skip
    """The role of one warp: load keys and queries, or values. Pages are looked up one tile
    ahead."""
    count, asked = 0, 0
    for k in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _nth_item(k)
        if item < num_items:
            head, seq, first_row, _, _, context, num_tiles, _ = _find(
                item, work[0], work[1], work[2], NUM_HEADS, BLOCK_T
            )
            if num_tiles > 0:
                table = page_table + seq * table_row
                last_page = (context - 1) // PAGE_SIZE
                column = head // GROUP * HEAD_DIM
                pages = _look_up(table, num_tiles - 1, last_page, PAGE_SIZE, BLOCK_T)
                for i in range(num_tiles):
                    tile = num_tiles - 1 - i
                    ahead = _look_up(table, gl.maximum(tile - 1, 0), last_page, PAGE_SIZE, BLOCK_T)
                    _ask_for(desc, ring, count + i, pages, column, PAGE_SIZE, BLOCK_T, STAGES)
                    if WITH_QUERIES:
                        if i == 0:  # after the keys: the last item may still use its queries
                            _ask_for_queries(q_desc, queries, asked, first_row, head * HEAD_DIM)
                    pages = ahead
                asked += 1
            count += num_tiles


@gluon.jit
def _weigh(
    scores, position, tile, best, total, scale,
    BLOCK_T: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Turn a tile's scores into weights. Also returns the best score and sum of weights so far, and
    the factor for earlier sums."""
    if MASKED:
        t = tile * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, layout))
        scores = gl.where(t[None, :] <= position[:, None], scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * scale)
    # A query that has seen no key yet would compute -inf - -inf here.
    anchor = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    shrink = gl.exp2(best - anchor)
    weights = gl.exp2(scores * scale - anchor[:, None])
    return weights, higher, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _score(
    at, query, keys, turns, half,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start a tile's scores when the other half has finished its own."""
    mbarrier.wait(turns.index(half), (at & 1) ^ half ^ 1)
    none = gl.zeros([HALF, BLOCK_T], gl.float32, layout)
    return warpgroup_mma(
        query, keys[0].index(at % STAGES).permute((1, 0)), none, use_acc=False, is_async=True
    )


@gluon.jit
def _step(
    at, end, query, keys, values, turns, weights, acc, best, total, position, scale, half,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Compute the scores and weights of tile `at`, and the values of the tile before it."""
    before = (at - 1) % STAGES
    weights = gl.convert_layout(weights.to(query.dtype), gl.DotOperandLayout(0, o_layout, 2))
    scores = _score(at, query, keys, turns, half, BLOCK_T, STAGES, s_layout)
    mbarrier.wait(values[1].index(before), (at - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values[0].index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(half ^ 1))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys[2].index(at % STAGES))
    weights, best, total, shrink = _weigh(
        scores, position, end - 1 - at, best, total, scale, BLOCK_T, MASKED, s_layout
    )
    # Wait for the next tile's keys here, because a wait is a branch. The assembler would move the
    # weights after the products that they should overlap, but not across a branch. After the last
    # tile this waits for the same tile again; its slot is not reused before the queries are
    # released.
    ahead = gl.minimum(at + 1, end - 1)
    mbarrier.wait(keys[1].index(ahead % STAGES), ahead // STAGES & 1)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(values[2].index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return weights, acc, best, total


@gluon.jit
def _clear_behind(
    tile, first, context, HEAD_DIM: gl.constexpr, BLOCK_T: gl.constexpr,
):  # fmt: skip
    """Write zeros over values of no token: zero times NaN is NaN. Both halves do this, with the
    same result."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 * 8 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    t = first + gl.arange(0, BLOCK_T, gl.SliceLayout(1, layout))
    tile.store(gl.where((t < context)[:, None], tile.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _attend(
    begin, asked, found, queries, keys, values, turns, out, scale, half,
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries of an item over all of its tiles; the first is number `begin` of the
    ring."""
    head, _, first_row, num_rows, lowest, context, num_tiles, num_whole = found
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    position = lowest + half * HALF + gl.arange(0, HALF, s_rows)
    best = gl.full([HALF], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([HALF], gl.float32, s_rows)
    query = queries[0].index(half)
    stage, phase, end = begin % STAGES, begin // STAGES & 1, begin + num_tiles
    mbarrier.wait(queries[1].index(half), asked & 1)
    mbarrier.wait(keys[1].index(stage), phase)
    scores = _score(begin, query, keys, turns, half, BLOCK_T, STAGES, s_layout)
    mbarrier.arrive(turns.index(half ^ 1))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys[2].index(stage))
    mbarrier.wait(values[1].index(stage), phase)
    if num_tiles * BLOCK_T > context:
        _clear_behind(values[0].index(stage), (num_tiles - 1) * BLOCK_T, context, HEAD_DIM, BLOCK_T)
    weights, best, total, _ = _weigh(
        scores, position, num_tiles - 1, best, total, scale, BLOCK_T, True, s_layout
    )
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_layout)
    ahead = gl.minimum(begin + 1, end - 1)
    mbarrier.wait(keys[1].index(ahead % STAGES), ahead // STAGES & 1)
    for at in range(begin + 1, end - num_whole):
        weights, acc, best, total = _step(
            at, end, query, keys, values, turns, weights, acc, best, total, position, scale, half,
            BLOCK_T, STAGES, True, s_layout, o_layout,
        )  # fmt: skip
    for at in range(end - num_whole, end):
        weights, acc, best, total = _step(
            at, end, query, keys, values, turns, weights, acc, best, total, position, scale, half,
            BLOCK_T, STAGES, False, s_layout, o_layout,
        )  # fmt: skip
    mbarrier.arrive(queries[2].index(half))
    last = end - 1
    weights = gl.convert_layout(weights.to(query.dtype), gl.DotOperandLayout(0, o_layout, 2))
    mbarrier.wait(values[1].index(last % STAGES), last // STAGES & 1)
    acc = warpgroup_mma(weights, values[0].index(last % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(values[2].index(last % STAGES))
    acc = acc * gl.convert_layout(1.0 / total, o_rows)[:, None]
    r = half * HALF + gl.arange(0, HALF, o_rows)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    row = (first_row + r).to(gl.int64) * NUM_HEADS + head
    gl.store(
        out + row[:, None] * HEAD_DIM + d[None, :], acc.to(query.dtype),
        mask=(r < num_rows)[:, None],
    )  # fmt: skip


@gluon.jit
def _compute(
    queries, keys, values, turns, work, out, scale, num_items, half,
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The role of four warps: 64 queries of each item."""
    count, asked = 0, 0
    for k in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _nth_item(k)
        if item < num_items:
            found = _find(item, work[0], work[1], work[2], NUM_HEADS, BLOCK_T)
            num_tiles = found[6]
            if num_tiles > 0:
                _attend(
                    count, asked, found, queries, keys, values, turns, out, scale, half,
                    NUM_HEADS, HEAD_DIM, BLOCK_T, STAGES,
                )  # fmt: skip
                asked += 1
            count += num_tiles


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit(
    # Compiled once for all steps, because compiling takes seconds.
    do_not_specialize=["table_row", "num_items"],
    do_not_specialize_on_alignment=["page_table", "query_starts", "context_lens", "query_blocks"],
)
def _prefill(
    q_desc, k_desc, v_desc, page_table, query_starts, context_lens, query_blocks, out, scale,
    table_row, num_items,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_T, HEAD_DIM], dtype)
    # Ring slots; for each, a barrier for 'full' and one for 'all readers done'.
    queries = (
        gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], q_desc.layout),
        _barriers(2, 1), _barriers(2, 1),
    )  # fmt: skip
    keys = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, HEAD_DIM], layout),
        _barriers(STAGES, 1), _barriers(STAGES, 2),
    )  # fmt: skip
    values = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, HEAD_DIM], layout),
        _barriers(STAGES, 1), _barriers(STAGES, 2),
    )  # fmt: skip
    turns = _barriers(2, 1)
    fence_async_shared()
    work = (query_blocks, query_starts, context_lens)
    gl.warp_specialize(
        [
            (_compute, (
                queries, keys, values, turns, work, out, scale, num_items, 0,
                NUM_HEADS, HEAD_DIM, BLOCK_T, STAGES,
            )),
            (_compute, (
                queries, keys, values, turns, work, out, scale, num_items, 1,
                NUM_HEADS, HEAD_DIM, BLOCK_T, STAGES,
            )),
            (_copy, (
                q_desc, k_desc, queries, keys, work, page_table, table_row, num_items,
                NUM_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, BLOCK_T, STAGES, True,
            )),
            (_copy, (
                q_desc, v_desc, queries, values, work, page_table, table_row, num_items,
                NUM_HEADS, GROUP, HEAD_DIM, PAGE_SIZE, BLOCK_T, STAGES, False,
            )),
        ],
        [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


@lru_cache(maxsize=8)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_for(
    q: Tensor,
    layer_kv: Tensor,
    segments: PrefillSegments,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> bool:
    """Whether this kernel supports such queries and pages and is faster. It needs bfloat16, heads
    of 128 numbers, no window, no sinks, pages that fill tiles, and long prompts."""
    page_size = layer_kv.shape[2]
    return (
        is_hopper(q.device)
        and q.dtype == layer_kv.dtype == torch.bfloat16
        and q.shape[2] == HEAD_DIM
        and not window
        and sinks is None
        and page_size in PAGE_SIZES
        and q.shape[0] >= LONG * segments.page_table.shape[0]
    )


def prefill_attention(
    q: Tensor,
    layer_kv: Tensor,
    segments: PrefillSegments,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Any number of queries per sequence, q [num_tokens, heads, head_dim]; causal."""
    assert not window, "see is_for"
    assert sinks is None, "see is_for"
    num_heads, page_size, kv_heads = q.shape[1], *layer_kv.shape[2:4]
    out = torch.empty_like(q) if out is None else out
    num_items = num_heads * segments.query_blocks.shape[0]
    # A plain launch: it starts when the kernel before it is done.
    _prefill[(min(num_items, _num_multiprocessors(q.device)),)](
        *descriptors(q, layer_kv), segments.page_table, segments.query_starts,
        segments.context_lens, segments.query_blocks, out, scale * LOG2_E,
        segments.page_table.stride(0), num_items, NUM_HEADS=num_heads,
        GROUP=num_heads // kv_heads, HEAD_DIM=HEAD_DIM, PAGE_SIZE=page_size, BLOCK_T=BLOCK_T,
        STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return out


def descriptors(q: Tensor, layer_kv: Tensor) -> list[object]:
    """Tensor descriptors of queries, keys and values for the copy engine: shapes, and boxes of half
    a block of queries and of one head's page."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, _, page_size, kv_heads, _ = layer_kv.shape
    width = num_heads * head_dim
    pages = [num_pages, page_size, kv_heads * head_dim]
    strides = [layer_kv.stride(0), layer_kv.stride(2), 1]
    return [
        _describe(q, [num_tokens, width], [width, 1], (HALF.value, head_dim)),
        _describe(layer_kv[:, 0], pages, strides, (1, page_size, head_dim)),
        _describe(layer_kv[:, 1], pages, strides, (1, page_size, head_dim)),
    ]


def _describe(
    base: Tensor, shape: list[int], strides: list[int], box: tuple[int, ...]
) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, list(box), _layout(box))


@lru_cache(maxsize=32)
def _layout(box: tuple[int, ...]) -> object:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
