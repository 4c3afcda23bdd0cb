"""Prompts' attention to windows and entries on Hopper GPUs, in Gluon.

Same signature as `reference.py`, for inputs that `is_for` accepts; `triton_attend.py` takes the
rest. A program takes one query of 64 heads after another. Four warps copy the rows that a query
sees, 64 a tile, from wherever they lie: tokens of its window first, then entries, all or those
chosen. Eight warps compute; a row is key and value. A tile's scores are multiplied right after the
values of the tile before it, so that matrix instructions wait only for weights. Scores are in units
of log2, because the chip computes exp2.

Places after a query's last row hold that row again, with no weight. Results are rotated back in
registers, before they are stored.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from manyroots.kernels.attention.triton_hopper import _barriers, _num_multiprocessors
from manyroots.kernels.compressed.inputs import KeyRows
from manyroots.kernels.launch import is_hopper
from manyroots.kernels.qk_rope_kv_write.inputs import RopeTable

LOG2_E = math.log2(math.e)
DIM = 512
HALF = gl.constexpr(256)
"""Numbers of a tile's halves, left and right."""
HEADS = gl.constexpr(64)
"""Of a program."""
ROWS = gl.constexpr(64)
"""Rows of a tile."""
STAGES = gl.constexpr(2)
"""Tiles that are loaded or being loaded; shared memory holds no more."""
WARPS = gl.constexpr(8)
COPY_WARPS = gl.constexpr(4)
COPY_REGISTERS = gl.constexpr(80)
"""Registers of a thread that copies."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's names
_copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_sync = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _find(
    item, lens, seqs, most, BLOCKS: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
    IS_CHOSEN: gl.constexpr,
):  # fmt: skip
    """An item of work is a query of a block of heads. Returns its token, its sequence, the first
    token that it sees, how many it sees, and how many entries."""
    token = item // BLOCKS
    length = gl.load(lens + token)
    seq = gl.load(seqs + token).to(gl.int64)
    first = 0
    if WINDOW:
        first = gl.maximum(length - WINDOW, 0)
    num_entries = 0
    if GROUP:
        num_entries = length // GROUP
        if IS_CHOSEN:
            num_entries = gl.minimum(num_entries, most)
    return token, seq, first, length - first, num_entries


@gluon.jit
def _num_tiles(found):
    return gl.cdiv(found[3], ROWS), gl.maximum(gl.cdiv(found[3], ROWS) + gl.cdiv(found[4], ROWS), 1)


@gluon.jit
def _rows(
    found, tile, own, others, chosen, chosen_row, PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr,
    IS_CHOSEN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Pointers to a tile's rows."""
    token, seq, first, num_keys, num_entries = found
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    key_tiles = gl.cdiv(num_keys, ROWS)
    pages, table, table_row, page_stride, row_stride = own
    t = gl.minimum(tile * ROWS + r, gl.maximum(num_keys - 1, 0))
    if GROUP:
        if tile < key_tiles:
            t = first + t
            page = gl.maximum(gl.load(table + seq * table_row + t // PAGE_SIZE), 0).to(gl.int64)
            rows = pages + page * page_stride + (t % PAGE_SIZE).to(gl.int64) * row_stride
        else:
            pages, table, table_row, page_stride, row_stride = others
            of_page: gl.constexpr = PAGE_SIZE // GROUP
            n = gl.minimum((tile - key_tiles) * ROWS + r, num_entries - 1)
            if IS_CHOSEN:
                n = gl.load(chosen + token.to(gl.int64) * chosen_row + n).to(gl.int32)
            page = gl.load(table + seq * table_row + n // of_page).to(gl.int64)
            rows = pages + page * page_stride + (n % of_page).to(gl.int64) * row_stride
    else:
        t = first + t
        page = gl.maximum(gl.load(table + seq * table_row + t // PAGE_SIZE), 0).to(gl.int64)
        rows = pages + page * page_stride + (t % PAGE_SIZE).to(gl.int64) * row_stride
    return rows


@gluon.jit
def _start(rows, ring, at, layout: gl.constexpr):
    """Copy a tile into the ring as number `at`, as soon as its place is free."""
    stage = at % STAGES
    mbarrier.wait(ring[3].index(stage), (at // STAGES & 1) ^ 1)
    d = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    for half in gl.static_range(2):
        _copy_rows(ring[half].index(stage), rows[:, None] + (d + half * HALF)[None, :])
    async_copy.commit_group()


@gluon.jit
def _finish(ring, at):
    """Wait for the copy, and tell the computing warps."""
    async_copy.wait_group(0)
    fence_async_shared()
    _sync()
    mbarrier.arrive(ring[2].index(at % STAGES))


@gluon.jit
def _ask_for_queries(q_desc, queries, item, asked):
    left, right, full, empty = queries
    mbarrier.wait(empty, (asked & 1) ^ 1)
    mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
    _load(q_desc, [item * HEADS, 0], full, left)
    _load(q_desc, [item * HEADS, HALF], full, right)


@gluon.jit
def _copy(
    q_desc, queries, ring, own, others, chosen, chosen_row, lens, seqs, most, num_items,
    BLOCKS: gl.constexpr, WINDOW: gl.constexpr, PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr,
    IS_CHOSEN: gl.constexpr,
):  # fmt: skip
    """The role of the copying warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [COPY_WARPS, 1], [1, 0])
    item, at, asked = gl.program_id(0), 0, 0
    found = _find(item, lens, seqs, most, BLOCKS, WINDOW, GROUP, IS_CHOSEN)
    rows = _rows(found, 0, own, others, chosen, chosen_row, PAGE_SIZE, GROUP, IS_CHOSEN, layout)
    while item < num_items:
        _, num_tiles = _num_tiles(found)
        for i in range(num_tiles - 1):
            _start(rows, ring, at + i, layout)
            if i == 0:
                _ask_for_queries(q_desc, queries, item, asked)
            rows = _rows(
                found, i + 1, own, others, chosen, chosen_row, PAGE_SIZE, GROUP, IS_CHOSEN, layout
            )
            _finish(ring, at + i)
        at += num_tiles
        _start(rows, ring, at - 1, layout)
        if num_tiles == 1:
            _ask_for_queries(q_desc, queries, item, asked)
        asked += 1
        item += gl.num_programs(0)
        found = _find(
            gl.minimum(item, num_items - 1), lens, seqs, most, BLOCKS, WINDOW, GROUP, IS_CHOSEN
        )
        rows = _rows(found, 0, own, others, chosen, chosen_row, PAGE_SIZE, GROUP, IS_CHOSEN, layout)
        _finish(ring, at - 1)


@gluon.jit
def _score(queries, ring, at, layout: gl.constexpr):
    """Start a tile's scores when it is loaded: two products."""
    stage = at % STAGES
    mbarrier.wait(ring[2].index(stage), at // STAGES & 1)
    scores = gl.zeros([HEADS, ROWS], gl.float32, layout)
    scores = warpgroup_mma(
        queries[0], ring[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True
    )
    return warpgroup_mma(queries[1], ring[1].index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _take_in(
    scores, ring, stage, weights_at, count, scale, best, totals, left, right,
    s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Turn a tile's scores of `count` rows into weights and start adding its values: two
    products."""
    t = gl.arange(0, ROWS, gl.SliceLayout(0, s_layout))
    scores = gl.where((t < count)[None, :], scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * scale)
    shrink = gl.exp2(best - higher)
    weights = gl.exp2(scores * scale - higher[:, None])
    totals = totals * shrink[:, None] + weights
    weights_at.store(weights.to(ring[0].dtype))
    fence_async_shared()
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    left = warpgroup_mma(weights_at, ring[0].index(stage), left * factor, is_async=True)
    right = warpgroup_mma(weights_at, ring[1].index(stage), right * factor, is_async=True)
    return higher, totals, left, right


@gluon.jit
def _count(found, key_tiles, tile):
    """Rows of a tile; more than it holds stand for all."""
    after = (tile - key_tiles) * ROWS
    return gl.where(tile < key_tiles, found[3] - tile * ROWS, found[4] - after)


@gluon.jit
def _rotated_back(x, cos, sin, token, PAIRS: gl.constexpr, layout: gl.constexpr):
    """The right half of what heads attended to, its last 2 * PAIRS numbers rotated back."""
    d = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    place = d - (HALF - 2 * PAIRS)
    at = token.to(gl.int64) * PAIRS + place // 2
    is_rotated = place >= 0
    c = gl.load(cos + at, mask=is_rotated, other=1.0)
    s = gl.load(sin + at, mask=is_rotated, other=0.0)
    s = gl.where(d % 2 == 0, s, -s)
    # Neighbours are registers of one thread, so nothing moves.
    first, second = gl.split(x.reshape([HEADS, HALF // 2, 2]))
    other = gl.join(second, first).reshape([HEADS, HALF])
    other = gl.convert_layout(other, layout, assert_trivial=True)
    return x * c[None, :] + other * s[None, :]


@gluon.jit
def _attend(
    queries, ring, weights_at, sinks, cos, sin, out, lens, seqs, most, scale, log2_e, num_items,
    BLOCKS: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr, IS_CHOSEN: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The role of the computing warps."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    q_full, q_empty, empty = queries[2], queries[3], ring[3]
    item, at, asked = gl.program_id(0), 0, 0
    g = gl.arange(0, HEADS, gl.SliceLayout(1, s_layout))
    h = gl.arange(0, HEADS, gl.SliceLayout(1, o_layout))
    d = gl.arange(0, HALF, gl.SliceLayout(0, o_layout))
    while item < num_items:
        found = _find(item, lens, seqs, most, BLOCKS, WINDOW, GROUP, IS_CHOSEN)
        key_tiles, num_tiles = _num_tiles(found)
        sink = gl.load(sinks + item % BLOCKS * HEADS + g) * log2_e
        best = sink
        totals = gl.zeros([HEADS, ROWS], gl.float32, s_layout)
        left = gl.zeros([HEADS, HALF], gl.float32, o_layout)
        right = gl.zeros([HEADS, HALF], gl.float32, o_layout)
        mbarrier.wait(q_full, asked & 1)
        scores = _score(queries, ring, at, s_layout)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        for i in range(num_tiles - 1):
            stage = (at + i) % STAGES
            best, totals, left, right = _take_in(
                scores, ring, stage, weights_at, _count(found, key_tiles, i), scale, best, totals,
                left, right, s_layout, o_layout,
            )  # fmt: skip
            # The next tile's scores start at once, before this tile's values are done.
            ahead = _score(queries, ring, at + i + 1, s_layout)
            left, right = warpgroup_mma_wait(2, deps=(left, right))
            mbarrier.arrive(empty.index(stage))
            scores = warpgroup_mma_wait(0, deps=(ahead,))
        mbarrier.arrive(q_empty)
        at += num_tiles
        stage = (at - 1) % STAGES
        best, totals, left, right = _take_in(
            scores, ring, stage, weights_at, _count(found, key_tiles, num_tiles - 1), scale, best,
            totals, left, right, s_layout, o_layout,
        )  # fmt: skip
        total = gl.sum(totals, 1) + gl.exp2(sink - best)
        factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(empty.index(stage))
        row = (item * HEADS + h).to(gl.int64) * (2 * HALF)
        to = out + row[:, None] + d[None, :]
        # A query that is only padding sees nothing, and what lies there may be no numbers.
        left = gl.where(found[3] > 0, left * factor, 0.0)
        right = gl.where(found[3] > 0, right * factor, 0.0)
        gl.store(to, left.to(out.dtype.element_ty))
        right = _rotated_back(right, cos, sin, found[0], PAIRS, o_layout)
        gl.store(to + HALF, right.to(out.dtype.element_ty))
        asked += 1
        item += gl.num_programs(0)


@gluon.jit(
    # Compiled once for all steps, because compiling takes seconds.
    do_not_specialize=[
        "num_items", "key_table_row", "entry_table_row", "chosen_row", "most",
    ],
    do_not_specialize_on_alignment=[
        "key_table", "entry_table", "seqs", "lens", "chosen", "sinks", "cos", "sin",
    ],
)  # fmt: skip
def _prompt(
    q_desc, keys, entries, chosen, sinks, cos, sin, key_table, entry_table, seqs, lens, out, scale,
    log2_e, key_table_row, entry_table_row, key_page, key_row, entry_page, entry_row, chosen_row,
    most, num_items,
    BLOCKS: gl.constexpr, WINDOW: gl.constexpr, PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr,
    IS_CHOSEN: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """`GROUP`: tokens of an entry; 0 without entries. `most`: entries that a query chooses."""
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    weights: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, ROWS], dtype)
    queries = (
        gl.allocate_shared_memory(dtype, [HEADS, HALF], q_desc.layout),
        gl.allocate_shared_memory(dtype, [HEADS, HALF], q_desc.layout),
        _barriers(1, 1).index(0), _barriers(1, 1).index(0),
    )  # fmt: skip
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, HALF], tile),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, HALF], tile),
        _barriers(STAGES, 1), _barriers(STAGES, 1),
    )  # fmt: skip
    weights_at = gl.allocate_shared_memory(dtype, [HEADS, ROWS], weights)
    fence_async_shared()
    own = (keys, key_table, key_table_row, key_page, key_row)
    others = (entries, entry_table, entry_table_row, entry_page, entry_row)
    gl.warp_specialize(
        [
            (_attend, (
                queries, ring, weights_at, sinks, cos, sin, out, lens, seqs, most, scale, log2_e,
                num_items, BLOCKS, WINDOW, GROUP, IS_CHOSEN, PAIRS,
            )),
            (_copy, (
                q_desc, queries, ring, own, others, chosen, chosen_row, lens, seqs, most,
                num_items, BLOCKS, WINDOW, PAGE_SIZE, GROUP, IS_CHOSEN,
            )),
        ],
        [COPY_WARPS], [COPY_REGISTERS],
    )  # fmt: skip


def is_for(q: Tensor, keys: KeyRows, entries: KeyRows | None, angles: RopeTable) -> bool:
    """Whether this kernel supports such queries and rows: bfloat16, 512 numbers of which at most
    half are rotated, 64 heads or a multiple, and rows that copies of 16 bytes reach."""
    return (
        is_hopper(q.device)
        and q.dtype == keys.pages.dtype == torch.bfloat16
        and q.shape[2] == DIM
        and q.shape[1] % HEADS.value == 0
        and q.is_contiguous()
        and 2 * angles.cos.shape[1] <= HALF.value
        and all(_is_aligned(rows.pages) for rows in (keys, entries) if rows is not None)
    )


def _is_aligned(pages: Tensor) -> bool:
    strides = pages.stride()
    return strides[2] == 1 and not any(n % 16 for n in (*strides[:2], pages.data_ptr()))


def attend_rows(
    q: Tensor,
    keys: KeyRows,
    entries: KeyRows | None,
    chosen: Tensor | None,
    sinks: Tensor,
    scale: float,
    angles: RopeTable,
) -> Tensor:
    """What queries [tokens, heads, dim] attend to: keys of their windows, and entries, all or those
    chosen. A row is key and value, so values are rotated; the result is rotated back by each
    query's own `angles`. `sinks` [heads] take weight and give nothing."""
    num_tokens, heads, _ = q.shape
    out = torch.empty_like(q)
    blocks = heads // HEADS.value
    num_items = num_tokens * blocks
    step, second = keys.step, keys if entries is None else entries
    # A plain launch: it starts when the kernel before it is done.
    _prompt[(min(num_items, _num_multiprocessors(q.device)),)](
        _describe(q.view(num_tokens * heads, DIM)), keys.pages, second.pages,
        step.token_seqs if chosen is None else chosen, sinks, angles.cos, angles.sin,
        step.page_table, second.step.page_table, step.token_seqs, step.token_lens, out,
        scale * LOG2_E, LOG2_E, step.page_table.stride(0), second.step.page_table.stride(0),
        *keys.pages.stride()[:2], *second.pages.stride()[:2],
        *((0, 0) if chosen is None else (chosen.stride(0), chosen.shape[1])), num_items,
        BLOCKS=blocks, WINDOW=keys.window or 0, PAGE_SIZE=step.page_size,
        GROUP=0 if entries is None else entries.step.group, IS_CHOSEN=chosen is not None,
        PAIRS=angles.cos.shape[1], num_warps=WARPS.value,
    )  # fmt: skip
    return out


def _describe(q: Tensor) -> TensorDescriptor:
    box = (HEADS.value, HALF.value)
    return TensorDescriptor(q, list(q.shape), [DIM, 1], list(box), _layout(box))


@lru_cache(maxsize=8)
def _layout(box: tuple[int, ...]) -> object:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
