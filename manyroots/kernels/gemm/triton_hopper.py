"""Up to 64 rows times a large weight on Hopper GPUs, in Gluon: the weight comes before the rows.

Takes what `triton.py` would, where `hopper_tilings.py` has a tiling; gives the same. A program
multiplies its share of the weight block by block, from a ring in shared memory that the copy engine
fills. The weight is the matrix instruction's left operand. Weights are constants of a step, so the
whole ring is asked for while the kernel in front still runs (`launch.py`): 15 to 25 MB are on their
way when the rows are there.

Both are in bfloat16, or the weight is in FP8: then rows come in two numbers of FP8 each, or as they
are, and each program rounds the columns of its share itself, so that no kernel does it in front.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
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

from manyroots.kernels.fp8_rows import LEAST_SCALE, Fp8Rows
from manyroots.kernels.gemm.hopper_tilings import BLOCK_K, FEW_ROWS, RingTiling, block_m
from manyroots.kernels.launch import launch_options
from manyroots.kernels.scaled import LARGEST, Matrix

_INVERSE = gl.constexpr(1.0 / LARGEST)
_LEAST = gl.constexpr(LEAST_SCALE)
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


@gluon.jit
def _ask_for_weight(
    w_desc, ring, i, place, wanted,
    NUM_BYTES: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """The i-th block of this program: its row and column; with its rows it has so many bytes."""
    stage = i % STAGES
    piece: gl.constexpr = w_desc.block_type.shape[0]
    full = ring[2].index(stage)
    mbarrier.expect(full, NUM_BYTES, pred=wanted)
    for p in gl.static_range(PIECES):
        tile = ring[0].index(stage * PIECES + p)
        _load(w_desc, [place[0] + p * piece, place[1]], full, tile, pred=wanted)


@gluon.jit
def _ask_for_rows(
    x_desc, ring, i, place, num_rows, wanted, PARTS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Its rows, one part below the other. What is behind a part's last row is nobody's."""
    stage = i % STAGES
    size: gl.constexpr = x_desc.block_type.shape[0]
    for part in gl.static_range(PARTS):
        rows = ring[1].index(stage).slice(part * size, size)
        _load(x_desc, [part * num_rows, place[1]], ring[2].index(stage), rows, pred=wanted)


@gluon.jit
def _next(place, k_end, TILE: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where the block behind this one is."""
    k = place[1] + BLOCK_K
    is_last = k >= k_end
    return gl.where(is_last, place[0] + TILE, place[0]), gl.where(is_last, 0, k)


@gluon.jit
def _nearest(scaled):
    """See `nearest_fp8` in `triton_fp8_rows.py`."""
    bits = scaled.to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (scaled + 24576.0) - 24576.0
    return gl.where(gl.abs(scaled) < 0.015625, small, bits.to(gl.float32, bitcast=True))


@gluon.jit
def _round_rows(
    x, rows, first, num_rows, k_size,
    STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Rows in two numbers each into shared memory, for all blocks of a share; their scales."""
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    at = x + m[:, None] * k_size + first * BLOCK_K + k[None, :]
    is_row = (m < num_rows)[:, None]
    most = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, layout)
    blocks = ()
    for i in gl.static_range(STEPS):
        block = gl.load(at + i * BLOCK_K, mask=is_row, other=0.0).to(gl.float32)
        most = gl.maximum(most, gl.abs(block))
        blocks += (block,)  # type: ignore[assignment]
    scale = gl.maximum(gl.max(most, 1) * _INVERSE, _LEAST)
    inverse = 1.0 / scale
    for i in gl.static_range(STEPS):
        scaled = blocks[i] * inverse[:, None]
        large = _nearest(scaled)
        place = rows.index(i)
        place.slice(0, BLOCK_M).store(large.to(gl.float8e4nv))
        place.slice(BLOCK_M, BLOCK_M).store((scaled - large).to(gl.float8e4nv))
    fence_async_shared()
    return scale


@gluon.jit
def _all_but(few: gl.constexpr, sums, PIECES: gl.constexpr):
    """A tile's sums when all but a few products are done."""
    done = warpgroup_mma_wait(few, deps=sums)
    return (done,) if PIECES == 1 else done


@gluon.jit
def _products(
    ring, stage, of_rows, acc, behind: gl.constexpr, alone: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """A block times its rows, added to `acc` or alone; so many blocks may still be multiplied."""
    sums = ()
    for p in gl.static_range(PIECES):
        tile = ring[0].index(stage * PIECES + p)
        sums += (  # type: ignore[assignment]
            warpgroup_mma(tile, of_rows, acc[p], use_acc=not alone, is_async=True),
        )
    return _all_but(behind * PIECES, sums, PIECES)


@gluon.jit
def _ring(
    w_desc, columns: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """Shared memory for weights and for rows, and of each block whether it is there."""
    dtype: gl.constexpr = w_desc.dtype
    box: gl.constexpr = w_desc.block_type.shape
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([columns, box[1]], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, box[0], box[1]], w_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [PLACES, columns, box[1]], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    return tiles, rows, full


@gluon.jit
def _zeros(PIECES: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(PIECES):
        zeros += (gl.zeros(shape, gl.float32, layout),)  # type: ignore[assignment]
    return zeros


@gluon.jit
def _add_up(
    x_desc, w_desc, ring, x_scales, first, last, tile, ahead, num_rows, num_blocks,
    SCALED: gl.constexpr, ROUNDED: gl.constexpr, GROUP: gl.constexpr, PRECISE: gl.constexpr,
    BLOCK_M: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr, NUM_BYTES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The sums of a tile's blocks in [first, last), this program's; and what it asks for next."""
    parts: gl.constexpr = 2 if SCALED else 1
    piece: gl.constexpr = w_desc.block_type.shape[0]
    block_k: gl.constexpr = w_desc.block_type.shape[1]
    alone: gl.constexpr = GROUP > 0 or PRECISE
    # How many blocks may still be multiplied while others are asked for.
    behind: gl.constexpr = 0 if SCALED else 1
    rows, full = ring[1], ring[2]
    row = gl.arange(0, parts * BLOCK_M, gl.SliceLayout(0, layout)) % BLOCK_M
    is_row = row < num_rows
    origin = tile * num_blocks
    begin, end = gl.maximum(first, origin), gl.minimum(last, origin + num_blocks)
    none = _zeros(PIECES, [piece, parts * BLOCK_M], layout)
    acc = _zeros(PIECES, [piece, parts * BLOCK_M], layout)
    # Read a block ahead, so that no sum waits for it.
    if GROUP:
        group = (begin - origin) * block_k // GROUP
        own = gl.load(x_scales + group * num_rows + row, mask=is_row, other=0.0)
    for at in range(begin, end):
        i = at - first
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        of_rows = rows.index(stage if ROUNDED else i).permute((1, 0))
        sums = _products(ring, stage, of_rows, none if alone else acc, behind, alone, PIECES)
        later = i + STAGES - behind
        wanted = (i >= behind) & (first + later < last)
        _ask_for_weight(w_desc, ring, later, ahead, wanted, NUM_BYTES, STAGES, PIECES)
        if ROUNDED:
            _ask_for_rows(x_desc, ring, later, ahead, num_rows, wanted, parts, STAGES)
        after = _next(ahead, num_blocks * block_k, PIECES * piece, block_k)
        ahead = gl.where(wanted, after[0], ahead[0]), gl.where(wanted, after[1], ahead[1])
        if GROUP:
            acc = (acc[0] + sums[0] * own[None, :],)
            group = (gl.minimum(at + 1, end - 1) - origin) * block_k // GROUP
            own = gl.load(x_scales + group * num_rows + row, mask=is_row, other=0.0)
        elif PRECISE:
            acc = (acc[0] + sums[0],)
        else:
            acc = sums
    return _all_but(0, acc, PIECES) if behind else acc, ahead


@gluon.jit
def _store(out, total, split, m, n, num_rows, n_size):
    to = out + (split * num_rows + m[None, :]).to(gl.int64) * n_size + n[:, None]
    is_ours = (m < num_rows)[None, :] & (n < n_size)[:, None]
    gl.store(to, total.to(out.dtype.element_ty), mask=is_ours)


@gluon.jit(
    # Compiled once for all steps, and for most shapes: it takes seconds.
    do_not_specialize=["num_rows", "num_blocks", "num_all", "share"],
    do_not_specialize_on_alignment=["bias"],
)
def _linear(
    x_desc, w_desc, x, x_scales, w_scales, bias, out,
    num_rows, n_size, k_size, num_blocks, num_all, share,
    SCALED: gl.constexpr, ROUNDED: gl.constexpr, GROUP: gl.constexpr, PRECISE: gl.constexpr,
    HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, PIECES: gl.constexpr,
    PIECE: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr, WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """SCALED: the weight is in FP8, with a scale for each row, and a share is of one tile, of one
    piece. Then rows come in FP8, with a scale for each GROUP columns, 0: one for all; or, not
    ROUNDED, as they are, and PLACES are as many blocks as a share has. PRECISE: blocks are added up
    in float32 (see `_scaled_product` in `triton.py`)."""
    if DEPENDENT:
        gdc_launch_dependents()
    parts: gl.constexpr = 2 if SCALED else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS, 1], [16, parts * BLOCK_M, 32 if SCALED else 16]
    )
    num_bytes: gl.constexpr = PIECES * w_desc.block_type.nbytes + (
        parts * x_desc.block_type.nbytes if ROUNDED else 0
    )
    ring = _ring(w_desc, parts * BLOCK_M, STAGES, PLACES, PIECES)
    first = gl.program_id(0) * share
    last = gl.minimum(first + share, num_all)
    tile, last_tile = first // num_blocks, (last - 1) // num_blocks
    block = first - tile * num_blocks
    split = (block + share - 1) // share
    begin = (tile * (PIECES * PIECE), block * BLOCK_K)
    ahead = begin
    for early in gl.static_range(STAGES):
        is_one = first + early < last
        _ask_for_weight(w_desc, ring, early, ahead, is_one, num_bytes, STAGES, PIECES)
        ahead = _next(ahead, num_blocks * BLOCK_K, PIECES * PIECE, BLOCK_K)
    if DEPENDENT:
        gdc_wait()
    if ROUNDED:
        place = begin
        for early in gl.static_range(STAGES):
            is_one = first + early < last
            _ask_for_rows(x_desc, ring, early, place, num_rows, is_one, parts, STAGES)
            place = _next(place, num_blocks * BLOCK_K, PIECES * PIECE, BLOCK_K)
    if SCALED:
        by_column: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, by_column))
        n = tile * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, by_column))
        # Read here, so that no sum waits for them.
        scales = gl.load(w_scales + n, mask=n < n_size, other=0.0)
        if not ROUNDED:
            by_row: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
            own_scale = _round_rows(
                x, ring[1], block, num_rows, k_size, PLACES, BLOCK_M, BLOCK_K, by_row
            )
        elif GROUP == 0:
            own_scale = gl.load(x_scales + m, mask=m < num_rows, other=0.0)
        acc, ahead = _add_up(
            x_desc, w_desc, ring, x_scales, first, last, tile, ahead, num_rows, num_blocks,
            SCALED, ROUNDED, GROUP, PRECISE, BLOCK_M, PIECES, STAGES, num_bytes, layout,
        )  # fmt: skip
        # Products with rows' first numbers, and with their second ones.
        both = gl.sum(gl.reshape(acc[0], [PIECE, 2, BLOCK_M]), axis=1)
        total = gl.convert_layout(both, by_column) * scales[:, None]
        if GROUP == 0:
            total *= gl.convert_layout(own_scale, gl.SliceLayout(0, by_column))[None, :]
        _store(out, total, split, m, n, num_rows, n_size)
    else:
        for at_tile in range(tile, last_tile + 1):
            acc, ahead = _add_up(
                x_desc, w_desc, ring, x_scales, first, last, at_tile, ahead, num_rows, num_blocks,
                SCALED, ROUNDED, GROUP, PRECISE, BLOCK_M, PIECES, STAGES, num_bytes, layout,
            )  # fmt: skip
            m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
            for p in gl.static_range(PIECES):
                n = (at_tile * PIECES + p) * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
                total = acc[p]
                if HAS_BIAS:
                    # Of the first split alone: the others' sums are added to its.
                    biased = gl.where(split == 0, n_size, 0)
                    total += gl.load(bias + n, mask=n < biased, other=0.0).to(gl.float32)[:, None]
                _store(out, total, split, m, n, num_rows, n_size)
            split = 0


def linear(
    x: Tensor | Fp8Rows, weight: Matrix, tiling: RingTiling, bias: Tensor | None = None
) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, and a bias [n]: partial sums [splits, rows, n] in
    float32, or one product in x's dtype. Rows for a weight in FP8 are in two numbers, or plain
    where `takes_plain` says so."""
    num_rows, k_size = x.shape
    n_size, splits, stages = weight.shape[0], tiling.num_splits, tiling.num_stages
    if isinstance(weight, Tensor):
        is_scaled, data, w_scales = False, weight, weight
    else:
        is_scaled, data, w_scales = True, weight.data, weight.scales
    # The copy engine is told of nothing that is read where rows come as they are.
    rows, x_scales, group, is_rounded = data, w_scales, 0, False
    if isinstance(x, Fp8Rows):
        rows, x_scales, is_rounded = x.data.view(-1, k_size), x.scales, True
        group = x.group if x.scales.shape[1] > 1 else 0
    elif not is_scaled:
        rows, is_rounded = x, True
    out = torch.empty(
        splits, num_rows, n_size, dtype=x.dtype if splits == 1 else torch.float32,
        device=data.device,
    )  # fmt: skip
    block = block_m(num_rows, 8 if is_scaled else 16)
    num_all = triton.cdiv(n_size, tiling.tile) * tiling.num_blocks
    _linear[(triton.cdiv(num_all, tiling.share),)](
        _describe(rows, block), _describe(data, tiling.piece),
        x if isinstance(x, Tensor) else out, x_scales, w_scales, out if bias is None else bias, out,
        num_rows, n_size, k_size, tiling.num_blocks, num_all, tiling.share,
        SCALED=is_scaled, ROUNDED=is_rounded, GROUP=group,
        PRECISE=is_scaled and num_rows <= FEW_ROWS, HAS_BIAS=bias is not None, BLOCK_M=block,
        BLOCK_K=BLOCK_K, PIECES=tiling.pieces, PIECE=tiling.piece, STAGES=stages,
        PLACES=stages if is_rounded else tiling.share, WARPS=tiling.num_warps,
        num_warps=tiling.num_warps, **launch_options(data.device),
    )  # fmt: skip
    return out


def _describe(matrix: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine is told of a matrix: its shape, and boxes of so many rows."""
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, BLOCK_K],
        _layout(rows, matrix.dtype),
    )  # fmt: skip


@lru_cache(maxsize=64)
def _layout(rows: int, dtype: torch.dtype) -> object:
    kind = gl.bfloat16 if dtype is torch.bfloat16 else gl.float8e4nv
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], kind)
