"""Prompt attention of latent models on Hopper GPUs, in Gluon.

Keys of 192 numbers and values of 128, as DeepSeek has, or 256 of both, as GLM has.

Same signature as `reference.py`, for inputs that `is_for` accepts; `triton_prompt.py` takes the
rest. The work is divided as in `attention/triton_hopper.py`: two warps start copies of keys and
values, and twice four warps have 64 queries each. Keys are copied in pieces, because all heads
share the last 64 numbers, and the width of a tile is a power of two. Tiles run from last to first,
so that partly visible tiles come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

from manyroots.kernels.attention.triton_hopper import (
    _barriers,
    _clear_behind,
    _nth_item,
    _num_multiprocessors,
    _weigh,
)
from manyroots.kernels.latent.inputs import KeyPiece, SplitKeys
from manyroots.kernels.launch import is_hopper

LOG2_E = math.log2(math.e)
HALF = gl.constexpr(64)
"""Queries of four warps: one matrix instruction's rows."""
BLOCK_Q = 2 * 64


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Of keys and values, and of a tile of them."""

    middle: int
    """Between the first piece of keys and what all heads share; may be nothing."""
    value: int
    tokens: int
    """Keys of a tile."""


SIZES = {
    (192, 128): TileSizes(middle=0, value=128, tokens=128),
    (256, 256): TileSizes(middle=64, value=256, tokens=64),
}
"""By the dimensions of keys and values: as many tokens as registers and shared memory hold."""
FIRST = gl.constexpr(128)
SHARED = gl.constexpr(64)
"""Numbers of the first and of the last piece of keys."""
STAGES = gl.constexpr(2)
"""Tiles that are loaded or being loaded."""
COMPUTE_REGISTERS = gl.constexpr(240)
COPY_REGISTERS = gl.constexpr(24)
FEWEST = 256
"""This kernel is used if the longest prompt has at least this many queries."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


@gluon.jit
def _find(item, work, NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """An item of work is a block of queries of one head. Returns the head, the block's first row,
    its number of queries, the keys that the first query sees, the first key, and the sequence's
    keys. Then the number of visible tiles, and of those that all queries see."""
    query_starts, key_starts, first_seen, num_seqs, num_blocks = work
    head, rest = item % NUM_HEADS, item // NUM_HEADS
    seq = rest % num_seqs
    first_query = (num_blocks - 1 - rest // num_seqs) * (2 * HALF)
    start = gl.load(query_starts + seq)
    num_rows = gl.load(query_starts + seq + 1) - start - first_query
    first_key = gl.load(key_starts + seq)
    num_keys = gl.load(key_starts + seq + 1) - first_key
    lowest = gl.load(first_seen + seq) + first_query
    num_seen = gl.minimum(num_keys, lowest + gl.minimum(num_rows, 2 * HALF))
    num_tiles = gl.where(num_rows > 0, gl.cdiv(gl.maximum(num_seen, 0), TOKENS), 0)
    num_whole = gl.maximum(gl.minimum((lowest + 1) // TOKENS, num_tiles - 1), 0)
    return head, start + first_query, num_rows, lowest, first_key, num_keys, num_tiles, num_whole


@gluon.jit
def _copy_keys(
    q_descs, k_descs, queries, keys, work, head_stride, num_items,
    NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr, MIDDLE: gl.constexpr,
):  # fmt: skip
    """The role of one warp: load keys and queries."""
    count, asked = 0, 0
    tile_bytes: gl.constexpr = (
        k_descs[0].block_type.nbytes
        + k_descs[1].block_type.nbytes
        + (k_descs[2].block_type.nbytes if MIDDLE else 0)
    )
    query_bytes: gl.constexpr = (
        q_descs[0].block_type.nbytes
        + q_descs[1].block_type.nbytes
        + (q_descs[2].block_type.nbytes if MIDDLE else 0)
    )
    for k in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _nth_item(k)
        if item < num_items:
            head, row, _, _, first_key, _, num_tiles, _ = _find(item, work, NUM_HEADS, TOKENS)
            column, own_column = head * (FIRST + MIDDLE + SHARED), head * head_stride
            for i in range(num_tiles):
                at = count + i
                stage = at % STAGES
                token = first_key + (num_tiles - 1 - i) * TOKENS
                full = keys[1].index(stage)
                mbarrier.wait(keys[2].index(stage), (at // STAGES & 1) ^ 1)
                mbarrier.expect(full, tile_bytes)
                _load(k_descs[0], [token, own_column], full, keys[0].index(stage))
                _load(k_descs[1], [token, 0], full, keys[3].index(stage))
                if MIDDLE:
                    _load(k_descs[2], [token, own_column + FIRST], full, keys[4].index(stage))
                if i == 0:  # after the keys: the last item may still use its queries
                    for half in gl.static_range(2):
                        full = queries[1].index(half)
                        mbarrier.wait(queries[2].index(half), (asked & 1) ^ 1)
                        mbarrier.expect(full, query_bytes)
                        first = row + half * HALF
                        _load(q_descs[0], [first, column], full, queries[0].index(half))
                        last = column + FIRST + MIDDLE
                        _load(q_descs[1], [first, last], full, queries[3].index(half))
                        if MIDDLE:
                            _load(q_descs[2], [first, column + FIRST], full, queries[4].index(half))
                    asked += 1
            count += num_tiles


@gluon.jit
def _copy_values(
    v_desc, values, work, head_stride, num_items, NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """The role of another warp: load values."""
    count = 0
    for k in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _nth_item(k)
        if item < num_items:
            head, _, _, _, first_key, _, num_tiles, _ = _find(item, work, NUM_HEADS, TOKENS)
            for i in range(num_tiles):
                at = count + i
                stage = at % STAGES
                token = first_key + (num_tiles - 1 - i) * TOKENS
                mbarrier.wait(values[2].index(stage), (at // STAGES & 1) ^ 1)
                mbarrier.expect(values[1].index(stage), v_desc.block_type.nbytes)
                _load(
                    v_desc, [token, head * head_stride], values[1].index(stage),
                    values[0].index(stage),
                )  # fmt: skip
            count += num_tiles


@gluon.jit
def _score(
    at, queries, keys, turns, half,
    TOKENS: gl.constexpr, MIDDLE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start a tile's scores when the other half has finished its own."""
    mbarrier.wait(turns.index(half), (at & 1) ^ half ^ 1)
    stage = at % STAGES
    none = gl.zeros([HALF, TOKENS], gl.float32, layout)
    scores = warpgroup_mma(
        queries[0].index(half), keys[0].index(stage).permute((1, 0)), none, use_acc=False,
        is_async=True,
    )  # fmt: skip
    if MIDDLE:
        scores = warpgroup_mma(
            queries[4].index(half), keys[4].index(stage).permute((1, 0)), scores, is_async=True
        )
    return warpgroup_mma(
        queries[3].index(half), keys[3].index(stage).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _step(
    at, end, queries, keys, values, turns, weights, acc, best, total, position, scale, half,
    TOKENS: gl.constexpr, MIDDLE: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Compute the scores and weights of tile `at`, and the values of the tile before it."""
    before = (at - 1) % STAGES
    weights = gl.convert_layout(weights.to(queries[0].dtype), gl.DotOperandLayout(0, o_layout, 2))
    scores = _score(at, queries, keys, turns, half, TOKENS, MIDDLE, s_layout)
    mbarrier.wait(values[1].index(before), (at - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, values[0].index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(half ^ 1))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys[2].index(at % STAGES))
    weights, best, total, shrink = _weigh(
        scores, position, end - 1 - at, best, total, scale, TOKENS, MASKED, s_layout
    )
    # Wait for the next tile's keys here, because a wait is a branch. The assembler would move the
    # weights after the products that they should overlap, but not across a branch.
    ahead = gl.minimum(at + 1, end - 1)
    mbarrier.wait(keys[1].index(ahead % STAGES), ahead // STAGES & 1)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(values[2].index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return weights, acc, best, total


@gluon.jit
def _attend(
    begin, asked, found, queries, keys, values, turns, out, sums, scale, half,
    NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr, MIDDLE: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries of an item over all of its tiles; the first is number `begin` of the
    ring."""
    head, first_row, num_rows, lowest, _, num_keys, num_tiles, num_whole = found
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    position = gl.minimum(lowest + half * HALF + gl.arange(0, HALF, s_rows), num_keys - 1)
    best = gl.full([HALF], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([HALF], gl.float32, s_rows)
    acc = gl.zeros([HALF, VALUE], gl.float32, o_layout)
    if num_tiles > 0:
        stage, phase, end = begin % STAGES, begin // STAGES & 1, begin + num_tiles
        mbarrier.wait(queries[1].index(half), asked & 1)
        mbarrier.wait(keys[1].index(stage), phase)
        scores = _score(begin, queries, keys, turns, half, TOKENS, MIDDLE, s_layout)
        mbarrier.arrive(turns.index(half ^ 1))
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(keys[2].index(stage))
        mbarrier.wait(values[1].index(stage), phase)
        if num_tiles * TOKENS > num_keys:
            _clear_behind(values[0].index(stage), (num_tiles - 1) * TOKENS, num_keys, VALUE, TOKENS)
        weights, best, total, _shrink = _weigh(
            scores, position, num_tiles - 1, best, total, scale, TOKENS, True, s_layout
        )
        ahead = gl.minimum(begin + 1, end - 1)
        mbarrier.wait(keys[1].index(ahead % STAGES), ahead // STAGES & 1)
        for at in range(begin + 1, end - num_whole):
            weights, acc, best, total = _step(
                at, end, queries, keys, values, turns, weights, acc, best, total, position, scale,
                half, TOKENS, MIDDLE, True, s_layout, o_layout,
            )  # fmt: skip
        for at in range(gl.maximum(end - num_whole, begin + 1), end):
            weights, acc, best, total = _step(
                at, end, queries, keys, values, turns, weights, acc, best, total, position, scale,
                half, TOKENS, MIDDLE, False, s_layout, o_layout,
            )  # fmt: skip
        mbarrier.arrive(queries[2].index(half))
        last = end - 1
        weights = gl.convert_layout(
            weights.to(queries[0].dtype), gl.DotOperandLayout(0, o_layout, 2)
        )
        mbarrier.wait(values[1].index(last % STAGES), last // STAGES & 1)
        acc = warpgroup_mma(weights, values[0].index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(values[2].index(last % STAGES))
    factor = gl.where(total > 0.0, 1.0 / total, 0.0)
    acc = acc * gl.convert_layout(factor, o_rows)[:, None]
    r = half * HALF + gl.arange(0, HALF, o_rows)
    d = gl.arange(0, VALUE, gl.SliceLayout(0, o_layout))
    row = (first_row + r).to(gl.int64) * NUM_HEADS + head
    gl.store(
        out + row[:, None] * VALUE + d[None, :], acc.to(queries[0].dtype),
        mask=(r < num_rows)[:, None],
    )  # fmt: skip
    ln_2: gl.constexpr = 0.6931471805599453
    r = half * HALF + gl.arange(0, HALF, s_rows)
    gl.store(
        sums + (first_row + r) * NUM_HEADS + head, (best + gl.log2(total)) * ln_2,
        mask=r < num_rows,
    )  # fmt: skip


@gluon.jit
def _compute(
    queries, keys, values, turns, work, out, sums, scale, num_items, half,
    NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr, MIDDLE: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """The role of four warps: 64 queries of each item."""
    count, asked = 0, 0
    for k in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = _nth_item(k)
        if item < num_items:
            found = _find(item, work, NUM_HEADS, TOKENS)
            if found[2] > 0:
                _attend(
                    count, asked, found, queries, keys, values, turns, out, sums, scale, half,
                    NUM_HEADS, TOKENS, MIDDLE, VALUE,
                )  # fmt: skip
            asked += gl.where(found[6] > 0, 1, 0)
            count += found[6]


@gluon.jit(
    # Compiled once for all steps, because compiling takes seconds.
    do_not_specialize=["num_seqs", "num_blocks", "num_items", "head_stride"],
    do_not_specialize_on_alignment=["query_starts", "key_starts", "first_seen", "sums"],
)
def _prompt(
    q_first, q_shared, q_middle, k_first, k_shared, k_middle, v_desc, query_starts, key_starts,
    first_seen, out, sums, scale, head_stride, num_seqs, num_blocks, num_items,
    NUM_HEADS: gl.constexpr, TOKENS: gl.constexpr, MIDDLE: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_first.dtype
    # Ring slots; for each, a barrier for 'full' and one for 'all readers done'.
    queries = (
        gl.allocate_shared_memory(dtype, [2, HALF, FIRST], q_first.layout),
        _barriers(2, 1), _barriers(2, 1),
        gl.allocate_shared_memory(dtype, [2, HALF, SHARED], q_shared.layout),
    )  # fmt: skip
    keys = (
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, FIRST], k_first.layout),
        _barriers(STAGES, 1), _barriers(STAGES, 2),
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, SHARED], k_shared.layout),
    )  # fmt: skip
    if MIDDLE:
        # fmt: off
        queries += (  # type: ignore[assignment]
            gl.allocate_shared_memory(dtype, [2, HALF, MIDDLE], q_middle.layout),
        )
        keys += (  # type: ignore[assignment]
            gl.allocate_shared_memory(dtype, [STAGES, TOKENS, MIDDLE], k_middle.layout),
        )
        # fmt: on
    values = (
        gl.allocate_shared_memory(dtype, [STAGES, TOKENS, VALUE], v_desc.layout),
        _barriers(STAGES, 1), _barriers(STAGES, 2),
    )  # fmt: skip
    turns = _barriers(2, 1)
    fence_async_shared()
    work = (query_starts, key_starts, first_seen, num_seqs, num_blocks)
    gl.warp_specialize(
        [
            (_compute, (
                queries, keys, values, turns, work, out, sums, scale, num_items, 0, NUM_HEADS,
                TOKENS, MIDDLE, VALUE,
            )),
            (_compute, (
                queries, keys, values, turns, work, out, sums, scale, num_items, 1, NUM_HEADS,
                TOKENS, MIDDLE, VALUE,
            )),
            (_copy_keys, (
                (q_first, q_shared, q_middle), (k_first, k_shared, k_middle), queries, keys, work,
                head_stride, num_items, NUM_HEADS, TOKENS, MIDDLE,
            )),
            (_copy_values, (v_desc, values, work, head_stride, num_items, NUM_HEADS, TOKENS)),
        ],
        [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def is_for(q: Tensor, keys: SplitKeys, v: Tensor, piece: KeyPiece) -> bool:
    """Whether this kernel supports such queries, keys and values and its large blocks pay:
    bfloat16, DeepSeek's or GLM's dimensions, and prompts that are not short."""
    own, shared = keys.own, keys.shared
    return (
        is_hopper(q.device)
        and q.dtype == own.dtype == shared.dtype == v.dtype == torch.bfloat16
        and (q.shape[2], v.shape[2]) in SIZES
        and q.stride()[1:] == (q.shape[2], 1)
        and q.stride(0) % 8 == 0
        and shared.shape[1] == SHARED.value
        and shared.is_contiguous()
        and own.stride() == v.stride()
        and v.stride(2) == 1
        and v.stride(0) % 8 == v.stride(1) % 8 == 0
        and piece.max_queries >= FEWEST
        and v.shape[0] > 0
    )


def attend_piece(
    q: Tensor, keys: SplitKeys, v: Tensor, piece: KeyPiece, scale: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with queries to a piece of keys and values; also returns logarithms of the sums of
    exponentials."""
    num_tokens, num_heads, key_dim = q.shape
    sizes = SIZES[key_dim, v.shape[2]]
    if out is None:
        out = q.new_empty(num_tokens, num_heads, sizes.value)
    sums = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    num_seqs = piece.first_seen.shape[0]
    num_blocks = -(-piece.max_queries // BLOCK_Q)
    num_items = num_heads * num_seqs * num_blocks
    # A plain launch: it starts when the kernel before it is done.
    _prompt[(min(num_items, _num_multiprocessors(q.device)),)](
        *descriptors(q, keys, v, sizes), piece.query_starts, piece.key_starts, piece.first_seen,
        out, sums, scale * LOG2_E, v.stride(1), num_seqs, num_blocks, num_items,
        NUM_HEADS=num_heads, TOKENS=sizes.tokens, MIDDLE=sizes.middle, VALUE=sizes.value,
        num_warps=4,
    )  # fmt: skip
    return out, sums


def descriptors(q: Tensor, keys: SplitKeys, v: Tensor, sizes: TileSizes) -> list[object]:
    """Tensor descriptors of queries, keys and values for the copy engine: rows of all heads'
    numbers, and boxes of one head's. Of queries and keys the first piece, the shared one, and the
    middle one or the first again."""
    widths = (FIRST.value, SHARED.value, sizes.middle or FIRST.value)
    parts = (keys.own, keys.shared, keys.own)
    found = [_describe(q, (HALF.value, width)) for width in widths]
    found += [
        _describe(part, (sizes.tokens, width)) for part, width in zip(parts, widths, strict=True)
    ]
    return [*found, _describe(v, (sizes.tokens, sizes.value))]


def _describe(x: Tensor, box: tuple[int, ...]) -> object:
    """Rows x[i], from the first number to the last one's end."""
    width = 1 + sum(
        (size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True)
    )
    return TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], list(box), _layout(box))


@lru_cache(maxsize=32)
def _layout(box: tuple[int, ...]) -> object:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
