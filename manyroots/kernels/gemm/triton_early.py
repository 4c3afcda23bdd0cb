"""A few rows times an FP8 weight on Hopper GPUs, in Gluon; loads the weight before the rows are
ready.

Same input and output as `triton.py`, for shapes with a tiling in `tiling_for`. A program has a tile
of the weight and multiplies it block by block, from a ring in shared memory that the copy engine
fills. Weights are constant in a step, so the whole ring is requested while the previous kernel
still runs (`launch.py`). 15 to 25 MB are in flight when the rows are ready. Rows come in two FP8
numbers each, block by block beside the weight, or in their original dtype. In that case each
program rounds the columns of its split, and no separate kernel is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from manyroots.kernels.launch import is_hopper, launch_options
from manyroots.kernels.scaled import LARGEST, ScaledMatrix

MAX_ROWS = 64
BLOCK_K = 128
"""Columns of a block: the most that one copy takes of a row."""
FEW_ROWS = 16
"""Up to this many rows, rows may be unrounded, and sums are in float32."""
MOST_STEPS = 16
"""Most blocks of a split whose rows a program rounds itself."""
_INVERSE = gl.constexpr(1.0 / LARGEST)
_LEAST = gl.constexpr(LEAST_SCALE)
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6's name


@dataclass(frozen=True, slots=True)
class EarlyTiling:
    """Tile sizes for one shape; found by measurement."""

    block_n: int
    num_splits: int
    num_stages: int
    """Blocks that are loaded or being loaded."""
    num_warps: int = 4


@gluon.jit
def _ask_for_weight(
    w_desc, tiles, full, stage, n, block, wanted, NUM_BYTES: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=wanted)
    _load(w_desc, [n, block * BLOCK_K], full.index(stage), tiles.index(stage), pred=wanted)


@gluon.jit
def _ask_for_rows(
    x_desc, rows, full, stage, block, wanted, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    for part in gl.static_range(2):
        _load(
            x_desc, [part, 0, block * BLOCK_K], full.index(stage),
            rows.index(stage).slice(part * BLOCK_M, BLOCK_M), pred=wanted,
        )  # fmt: skip


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
    """Write rows in two numbers each to shared memory, for all blocks of a split; returns their
    scales."""
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


@gluon.jit(do_not_specialize=["num_rows"])
def _linear(
    w_desc, x_desc, x, x_scales, w_scales, out, num_rows, n_size, k_size, num_steps,
    ROUNDED: gl.constexpr, GROUP: gl.constexpr, PRECISE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
    WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """ROUNDED: rows are in FP8, with a scale per GROUP columns; 0: one per row. Otherwise they are
    unrounded, and STAGES is at most PLACES, a split's number of blocks. PRECISE: blocks are added
    up in float32 (see `_scaled_product` in `triton.py`)."""
    if DEPENDENT:
        gdc_launch_dependents()
    columns: gl.constexpr = 2 * BLOCK_M
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 32])
    num_bytes: gl.constexpr = w_desc.block_type.nbytes + (
        2 * x_desc.block_type.nbytes if ROUNDED else 0
    )
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    rows = gl.allocate_shared_memory(
        dtype, [PLACES, columns, BLOCK_K],
        gl.NVMMASharedLayout.get_default_for([columns, BLOCK_K], dtype),
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    n, split = gl.program_id(0) * BLOCK_N, gl.program_id(1)
    first = split * num_steps
    for i in gl.static_range(STAGES):
        _ask_for_weight(w_desc, tiles, full, i, n, first + i, True, num_bytes, BLOCK_K)
    if DEPENDENT:
        gdc_wait()
    if ROUNDED:
        for i in gl.static_range(STAGES):
            _ask_for_rows(x_desc, rows, full, i, first + i, True, BLOCK_M, BLOCK_K)
    else:
        by_row: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        own_scale = _round_rows(x, rows, first, num_rows, k_size, PLACES, BLOCK_M, BLOCK_K, by_row)
    acc = gl.zeros([BLOCK_N, columns], gl.float32, layout)
    none = gl.zeros([BLOCK_N, columns], gl.float32, layout)
    row = gl.arange(0, columns, gl.SliceLayout(0, layout)) % BLOCK_M
    is_row = row < num_rows
    # Loaded one block ahead, so that no sum waits for it.
    if GROUP:
        own = gl.load(x_scales + first * BLOCK_K // GROUP * num_rows + row, mask=is_row, other=0.0)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        of_rows = rows.index(stage if ROUNDED else i).permute((1, 0))
        if GROUP or PRECISE:
            part = warpgroup_mma(tiles.index(stage), of_rows, none, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
        else:
            acc = warpgroup_mma(tiles.index(stage), of_rows, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
        more, ahead = i + STAGES < num_steps, first + i + STAGES
        _ask_for_weight(w_desc, tiles, full, stage, n, ahead, more, num_bytes, BLOCK_K)
        if ROUNDED:
            _ask_for_rows(x_desc, rows, full, stage, ahead, more, BLOCK_M, BLOCK_K)
        if GROUP:
            acc += part * own[None, :]
            group = (first + gl.minimum(i + 1, num_steps - 1)) * BLOCK_K // GROUP
            own = gl.load(x_scales + group * num_rows + row, mask=is_row, other=0.0)
        elif PRECISE:
            acc += part
    acc = gl.sum(gl.reshape(acc, [BLOCK_N, 2, BLOCK_M]), axis=1)
    by_column: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    total = gl.convert_layout(acc, by_column)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, by_column))
    at = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, by_column))
    total *= gl.load(w_scales + at, mask=at < n_size, other=0.0)[:, None]
    if not ROUNDED:
        total *= gl.convert_layout(own_scale, gl.SliceLayout(0, by_column))[None, :]
    elif GROUP == 0:
        total *= gl.load(x_scales + m, mask=m < num_rows, other=0.0)[None, :]
    to = out + (split * num_rows + m)[None, :].to(gl.int64) * n_size + at[:, None]
    is_ours = (m < num_rows)[None, :] & (at < n_size)[:, None]
    gl.store(to, total.to(out.dtype.element_ty), mask=is_ours)


def tiling_for(
    x: Tensor | Fp8Rows, weight: ScaledMatrix, *, on_hopper: bool | None = None
) -> EarlyTiling | None:
    """The tiling of this product. None if this kernel does not support it: not on Hopper, not in
    bfloat16, scales within rows of the weight, or splits of unequal size."""
    num_rows, k_size = x.shape
    is_here = is_hopper(weight.data.device) if on_hopper is None else on_hopper
    if not is_here or x.dtype is not torch.bfloat16 or not weight.has_row_scales:
        return None
    if num_rows > MAX_ROWS or k_size % BLOCK_K:
        return None
    num_blocks = k_size // BLOCK_K
    tiling = _tiling(num_rows, triton.cdiv(weight.shape[0], 64), num_blocks)
    while num_blocks % tiling.num_splits or num_blocks < 2 * tiling.num_splits:
        if tiling.num_splits == 1:
            return None
        tiling = EarlyTiling(
            tiling.block_n, tiling.num_splits // 2, tiling.num_stages, tiling.num_warps
        )
    return tiling


def _tiling(num_rows: int, tiles: int, num_blocks: int) -> EarlyTiling:
    """The fastest sizes on an H200 (132 multiprocessors), among those whose results were compared
    with float64 there. Norms, activations and as many bytes as attention reads ran between the
    products. `tiles`: tiles of 64 rows of the weight."""
    if num_rows <= FEW_ROWS:
        if tiles > 264:
            return EarlyTiling(128, 1, 6)
        if tiles > 66:
            return EarlyTiling(64, 4, 5)
        return EarlyTiling(64, 4, 6 if num_blocks <= 32 else 7)
    if tiles > 264:
        return EarlyTiling(64, 1, 4) if num_rows <= 32 else EarlyTiling(128, 1, 3, 8)
    stages = 6 if num_rows <= 32 else 4
    return EarlyTiling(64, 4 if tiles <= 66 else 2, stages)


def takes_plain(x: Tensor, tiling: EarlyTiling) -> bool:
    """Whether rows may be unrounded."""
    num_rows, k_size = x.shape
    return num_rows <= FEW_ROWS and k_size // BLOCK_K // tiling.num_splits <= MOST_STEPS


def linear(x: Tensor | Fp8Rows, weight: ScaledMatrix, tiling: EarlyTiling) -> Tensor:
    """x [rows, k], plain or in two numbers, times weight [n, k] transposed: partial sums [splits,
    rows, n] in float32, or one product in x's dtype."""
    num_rows, k_size = x.shape
    n_size, splits = weight.shape[0], tiling.num_splits
    num_steps = k_size // BLOCK_K // splits
    num_stages = min(tiling.num_stages, num_steps)
    device = weight.data.device
    is_rounded = isinstance(x, Fp8Rows)
    data, scales = (x.data, x.scales) if isinstance(x, Fp8Rows) else (weight.data, weight.scales)
    block_m = max(8, triton.next_power_of_2(num_rows))
    out = torch.empty(
        splits, num_rows, n_size, dtype=x.dtype if splits == 1 else torch.float32, device=device
    )
    group = x.group if isinstance(x, Fp8Rows) and x.scales.shape[1] > 1 else 0
    _linear[(triton.cdiv(n_size, tiling.block_n), splits)](
        *_descriptors(data, weight.data, num_rows, block_m, tiling.block_n),
        out if isinstance(x, Fp8Rows) else x, scales, weight.scales, out, num_rows, n_size, k_size,
        num_steps, ROUNDED=is_rounded, GROUP=group, PRECISE=num_rows <= FEW_ROWS, BLOCK_M=block_m,
        BLOCK_N=tiling.block_n, BLOCK_K=BLOCK_K, STAGES=num_stages,
        PLACES=num_stages if is_rounded else num_steps, WARPS=tiling.num_warps,
        num_warps=tiling.num_warps, **launch_options(device),
    )  # fmt: skip
    return out


def _descriptors(
    data: Tensor, weight: Tensor, num_rows: int, block_m: int, block_n: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Tensor descriptors for the copy engine, of the weight and of rows [2, rows, k]. For unrounded
    rows the second one is unused."""
    n_size, k_size = weight.shape
    rows_shape = [2, num_rows, k_size] if data.dim() == 3 else [1, n_size, k_size]
    return (
        TensorDescriptor(
            weight, [n_size, k_size], [k_size, 1], [block_n, BLOCK_K], _layout((block_n, BLOCK_K))
        ),
        TensorDescriptor(
            data, rows_shape, [rows_shape[1] * k_size, k_size, 1], [1, block_m, BLOCK_K],
            _layout((1, block_m, BLOCK_K)),
        ),
    )  # fmt: skip


@lru_cache(maxsize=32)
def _layout(box: tuple[int, ...]) -> object:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.float8e4nv)
