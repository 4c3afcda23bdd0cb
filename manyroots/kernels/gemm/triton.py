"""A few rows times a large weight: a kernel that reads the weight at the speed of memory.

Same signatures as `reference.py`. The weight is the matrix instruction's left operand, so 16 rows
cost no more than one. The inner dimension may be split; the next kernel adds up the partial sums.
FP8 weights are multiplied without conversion, with rows in two FP8 numbers each (`fp8_rows.py`).

The adapters' A are additional tiles of the same launch: they cost the time to read them, and their
arithmetic is free. Steps of up to 128 rows with adapters therefore use this kernel; without
adapters, only narrow weights do. While the previous kernel still runs, a program prefetches its
first tile of the weight; prefetching more made steps slower. `triton_hopper.py` takes the shapes
for which it is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Form, Fp8Rows, values_of
from manyroots.kernels.gemm import triton_early, triton_hopper
from manyroots.kernels.gemm.triton_hopper import RingTiling
from manyroots.kernels.launch import (
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.lora_ops.sites import (
    RANK_STEP,
    LinearSite,
    LoraRows,
    LoraTerm,
    typical_blocks,
)
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.kernels.scaled import SIDE_STEP, Int8Matrix, Matrix, ScaledMatrix
from manyroots.kernels.triton_fp8_rows import in_fp8

ROWS_AT_ONCE: int | None = None
MAX_ROWS, MAX_NARROW_ROWS = 64, 128
BLOCK_N = 64
BLOCK_K = 128
FEW_ROWS = 16
"""Up to this many rows, a product with FP8 accumulates in float32 at no cost."""
SOME_ROWS = 32
"""Up to this many rows, wide tiles fit."""
INT8: tl.constexpr = tl.constexpr(-1)
"""The value of SCALED for a weight in INT8; rows are then multiplied unchanged."""
INNER_STEP = 8
"""The inner dimension must be a multiple of this, so that rows are whole 16-byte loads."""
CACHE_LINE_BYTES = 128
MANY_TILES = 264
"""Tiles of 64 rows of a weight: more than two per multiprocessor."""
NARROW_TILES, WIDEST_TILES = 66, 1024
"""The same tiles: two halves of each fit at once. Only the output head has more."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes for one shape; found by measurement."""

    block_n: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int


@triton.jit
def _scaled_product(
    parts, x_scales, w_rows, scales, row_ok, num_rows, k_size, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """`_product` with W in FP8 and rows in two FP8 numbers each, which are rows of one operand.

    `scales` points to each row's scales of W, one per SCALED columns; with 1, one per row. Rows
    have a scale per GROUP columns; with 0, one per row. The FP8 matrix instructions keep sums to
    some 14 bits. A tile's sums are added up in float32 if scales differ between tiles or PRECISE
    requires it. Otherwise the error is smaller than that of a bfloat16 product.
    """
    both = tl.arange(0, 2 * BLOCK_M)
    row = both % BLOCK_M
    is_row = row < num_rows
    k = tl.arange(0, BLOCK_K)
    x_at = parts + (both // BLOCK_M * num_rows + row)[:, None] * k_size + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, 2 * BLOCK_M), tl.float32)
    # Loaded one tile ahead: waiting for a scale would cost as much as a tile.
    if GROUP:
        own = tl.load(x_scales + first // GROUP * num_rows + row, mask=is_row, other=0.0)
    if SCALED > 1:
        theirs = tl.load(scales + first // SCALED, mask=row_ok, other=0.0)
    for at in range(first, last, BLOCK_K):
        row_mask = is_row[:, None]
        ahead = tl.minimum(at + BLOCK_K, k_size - 1)
        if EVEN_K:
            weight = tl.load(w_at + at, eviction_policy="evict_first")
        else:
            inside = (at + k < k_size)[None, :]
            row_mask = row_mask & inside
            weight = tl.load(w_at + at, mask=inside, other=0.0, eviction_policy="evict_first")
        xs = tl.trans(tl.load(x_at + at, mask=row_mask, other=0.0))
        if GROUP or SCALED > 1:
            part = tl.dot(weight, xs)
            if SCALED > 1:
                part *= theirs[:, None]
                theirs = tl.load(scales + ahead // SCALED, mask=row_ok, other=0.0)
            if GROUP:
                part *= own[None, :]
                own = tl.load(x_scales + ahead // GROUP * num_rows + row, mask=is_row, other=0.0)
            acc += part
        elif PRECISE:
            acc = tl.dot(weight, xs, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(weight, xs, acc)
    acc = tl.sum(tl.reshape(acc, (BLOCK_N, 2, BLOCK_M)), axis=1)
    if SCALED == 1:
        acc *= tl.load(scales, mask=row_ok, other=0.0)[:, None]
    if not GROUP:
        m = tl.arange(0, BLOCK_M)
        acc *= tl.load(x_scales + m, mask=m < num_rows, other=0.0)[None, :]
    return acc


@triton.jit
def _product(
    x, w_rows, row_ok, num_rows, k_size, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """W x^T over [first, last) of the inner dimension: [BLOCK_N, BLOCK_M] in float32."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m[:, None] * k_size + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(first, last, BLOCK_K):
        # Masked, not clamped: a hundred programs that read one row many times would queue for it.
        row_mask = (m < num_rows)[:, None]
        weight_mask = row_ok[:, None]
        if not EVEN_K:
            inside = (at + k < k_size)[None, :]
            row_mask = row_mask & inside
            weight_mask = weight_mask & inside
        if EVEN_K and not MASKED:
            weight = tl.load(w_at + at, eviction_policy="evict_first")
        else:
            weight = tl.load(w_at + at, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        xs = tl.load(x_at + at, mask=row_mask, other=0.0)
        acc = tl.dot(weight.to(xs.dtype), tl.trans(xs), acc, input_precision="ieee")
    return acc


@triton.jit
def _squares_of(squares, num_pieces, num_rows, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """The sums of squares of the rows' pieces, [BLOCK_M, PIECES]."""
    m = tl.arange(0, BLOCK_M)[:, None]
    piece = tl.arange(0, PIECES)[None, :]
    is_one = (m < num_rows) & (piece < num_pieces)
    return tl.load(squares + m * num_pieces + piece, mask=is_one, other=0.0)


@triton.jit
def _divided(acc, of_pieces, k_size, eps):
    """Divide products of rows that their norm left undivided."""
    return acc * tl.rsqrt(tl.sum(of_pieces, axis=1) / k_size + eps)[None, :]


@triton.jit
def _shrink_tile(
    x, squares, num_pieces, hidden, pool, table, scalings, blocks, num_blocks, tile, split, first,
    last, num_rows, k_size, eps, width,
    NUM_PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply the adapters' A, one block after the other, as additional tiles of weights.

    Each of a tile's rows has one block of rows of x, and its result is stored for that block only.
    """
    v = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Each group of eight ranks belongs to one adapter.
    block = tl.max_constancy(v // width, 8)
    n = tl.max_contiguous(tl.multiple_of(v % width, 8), 8)
    count_blocks = tl.load(num_blocks)
    if (tile * BLOCK_N) // width < count_blocks:
        is_block = block < count_blocks
        begin = tl.load(blocks + 3 * block, mask=is_block, other=0)
        count = tl.load(blocks + 3 * block + 1, mask=is_block, other=0)
        slot = tl.load(blocks + 3 * block + 2, mask=is_block, other=-1)
        entry = table + tl.maximum(slot, 0) * (2 + 3 * NUM_PARTS)
        row_ok = (slot >= 0) & (n < tl.load(entry + 1).to(tl.int32))
        w_rows = pool + tl.multiple_of(tl.load(entry), 8) + n.to(tl.int64) * k_size
        scale = tl.load(scalings + tl.maximum(slot, 0) * NUM_PARTS)
        for part in tl.static_range(1, NUM_PARTS):
            later = tl.load(scalings + tl.maximum(slot, 0) * NUM_PARTS + part)
            scale = tl.where(n >= tl.load(entry + 2 + 3 * part).to(tl.int32), later, scale)
        # The adapters may not change this product.
        if tl.max(row_ok.to(tl.int32), axis=0) > 0:
            wait_for_inputs(DEPENDENT)
            if PIECES:
                of_pieces = _squares_of(squares, num_pieces, num_rows, BLOCK_M, PIECES)
            acc = _product(
                x, w_rows, row_ok, num_rows, k_size, first, last, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
                True,
            )  # fmt: skip
            if PIECES:
                acc = _divided(acc, of_pieces, k_size, eps)
            m = tl.arange(0, BLOCK_M)[:, None]
            mine = row_ok[None, :] & (m >= begin[None, :]) & (m < (begin + count)[None, :])
            to = hidden + (split * num_rows + m) * width + n[None, :]
            tl.store(to, tl.trans(acc * scale[:, None]), mask=mine)


@triton.jit(do_not_specialize=["num_rows", "lora_tiles"])
def _linear(
    x, parts, x_scales, squares, num_pieces, w, w_scales, num_groups, bias, out, hidden, pool,
    table, scalings, blocks, num_blocks, num_rows, n_size, k_size, eps, width, lora_tiles,
    SCALED: tl.constexpr, GROUP: tl.constexpr, PRECISE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, LINES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    pieces = k_size // BLOCK_K if EVEN_K else tl.cdiv(k_size, BLOCK_K)
    steps = tl.cdiv(pieces, tl.num_programs(1))
    first = split * steps * BLOCK_K
    last = tl.minimum(k_size, first + steps * BLOCK_K)
    if NUM_PARTS:
        if pid < lora_tiles:
            _shrink_tile(
                x, squares, num_pieces, hidden, pool, table, scalings, blocks, num_blocks, pid,
                split, first, last, num_rows, k_size, eps, width, NUM_PARTS, PIECES, BLOCK_M,
                BLOCK_N, BLOCK_K, EVEN_K, DEPENDENT,
            )  # fmt: skip
            return
    n = (pid - lora_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w + tl.minimum(n, n_size - 1).to(tl.int64) * k_size
    line = tl.arange(0, LINES) * (BLOCK_K // LINES)
    if not EVEN_K:
        line = tl.minimum(line, tl.maximum(k_size - 1 - first, 0))
    prefetch(w_rows[:, None] + first + line[None, :], DEPENDENT)
    if HAS_BIAS:
        # Added to the first split only: the other splits' sums are added to it.
        biased = tl.where(split == 0, n_size, 0)
        added = tl.load(bias + n, mask=n < biased, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    m = tl.arange(0, BLOCK_M)
    if PIECES:
        of_pieces = _squares_of(squares, num_pieces, num_rows, BLOCK_M, PIECES)
    if SCALED > 0:
        scales = w_scales + tl.minimum(n, n_size - 1) * num_groups
        acc = _scaled_product(
            parts, x_scales, w_rows, scales, n < n_size, num_rows, k_size, first, last, BLOCK_M,
            BLOCK_N, BLOCK_K, EVEN_K, SCALED, GROUP, PRECISE,
        )  # fmt: skip
    else:
        acc = _product(
            x, w_rows, n < n_size, num_rows, k_size, first, last, BLOCK_M, BLOCK_N, BLOCK_K,
            EVEN_K, False,
        )  # fmt: skip
    if SCALED == INT8:
        acc *= tl.load(w_scales + n, mask=n < n_size, other=0.0)[:, None]
    if PIECES:
        acc = _divided(acc, of_pieces, k_size, eps)
    if HAS_BIAS:
        acc += added[:, None]
    to = out + (split * num_rows + m[:, None]).to(tl.int64) * n_size + n[None, :]
    tl.store(to, tl.trans(acc), mask=(m < num_rows)[:, None] & (n < n_size)[None, :])


def is_for(num_rows: int, weight: Matrix, *, has_adapters: bool = False) -> bool:
    """Whether `linear` supports this product. Up to MAX_ROWS, reading the weight bounds a product,
    and this kernel reads it faster than the library. Up to MAX_NARROW_ROWS this still holds if a
    weight has few rows, or if the adapters' A are in the same launch. The library takes larger
    products."""
    if isinstance(weight, Tensor):
        if weight.shape[1] % INNER_STEP:
            return False
        return num_rows <= MAX_ROWS or _is_for_many(num_rows, weight, has_adapters)
    if isinstance(weight, Int8Matrix):  # the library would need it unpacked
        return num_rows <= MAX_NARROW_ROWS and weight.shape[1] % SIDE_STEP == 0
    # Rows of bytes must be whole 16-byte loads, and a tile must lie within a group of columns.
    fits = weight.has_row_scales or weight.group % BLOCK_K == 0
    return num_rows <= MAX_ROWS and weight.shape[1] % SIDE_STEP == 0 and fits


def _is_for_many(num_rows: int, weight: Tensor, has_adapters: bool) -> bool:
    if num_rows > MAX_NARROW_ROWS or weight.itemsize > 2:
        return False
    tiles = triton.cdiv(weight.shape[0], BLOCK_N)
    return tiles <= NARROW_TILES or (has_adapters and tiles <= WIDEST_TILES)


def form_for(num_rows: int, weight: ScaledMatrix, keeps_values: bool) -> Fp8Form:
    """The form in which `linear` reads rows that it supports. Up to FEW_ROWS, scales of groups of
    columns cost less than a kernel that finds one scale per row."""
    return Fp8Form(2, None if num_rows <= FEW_ROWS else weight.shape[1], keeps_values)


def linear(
    x: Tensor | Fp8Rows | DeferredRMSNorm,
    weight: Matrix,
    site: LinearSite | None = None,
    rows: LoraRows | None = None,
    bias: Tensor | None = None,
    *,
    tiling: Tiling | RingTiling | None = None,
) -> tuple[Tensor, LoraTerm | None]:
    """Multiply x [rows, k] with weight [n, k] transposed and add a bias [n]. Returns partial sums
    [splits, rows, n] in float32 or one product in x's dtype and, given a site, its adapters' shrink
    of x."""
    rows_in, squares, num_pieces, eps = _parts_of(x)
    num_rows, k_size = rows_in.shape
    n_size = weight.shape[0]
    is_whole = squares is None and (site is None or rows is None)
    if is_whole and isinstance(rows_in, Tensor) and isinstance(weight, Tensor):
        tiling = tiling or triton_hopper.tiling_for(rows_in, weight)
        if isinstance(tiling, RingTiling):
            return triton_hopper.multiply(rows_in, weight, tiling, bias), None
    assert not isinstance(tiling, RingTiling), "only whole rows without adapters"
    if tiling is None and isinstance(weight, ScaledMatrix):
        found = _early(rows_in, weight, bias, is_plain=squares is None and rows is None)
        if found is not None:
            return found, None
    operands = _operands(rows_in, weight)
    x = operands.x
    if tiling is None:
        wanted = 0 if site is None or rows is None else typical_blocks(num_rows) * site.width
        lora_tiles = triton.cdiv(wanted, BLOCK_N)
        if not isinstance(weight, ScaledMatrix):
            tiling = tiling_for(num_rows, n_size, k_size, lora_tiles)
        else:
            tiling = _scaled_tiling(num_rows, n_size, k_size, lora_tiles, operands.tile_group)
    splits = tiling.num_splits
    out = torch.empty(
        splits, num_rows, n_size, dtype=rows_in.dtype if splits == 1 else torch.float32,
        device=x.device,
    )  # fmt: skip
    if site is None or rows is None:
        term, lora_tiles = None, 0
        adapters = (out, x, x, x, x, x)
        width, num_parts = 1, 0
    else:
        width, num_parts = site.width, site.num_parts
        assert width % RANK_STEP == 0, "adapters' ranks are rounded up"
        # A single sum is as precise as its factors; partial sums must not be rounded.
        kept = site.pool.dtype if splits == 1 else torch.float32
        hidden = torch.empty(splits, num_rows, width, dtype=kept, device=x.device)
        term = LoraTerm(hidden, site, rows)
        lora_tiles = triton.cdiv(rows.max_blocks * width, tiling.block_n)
        adapters = (hidden, site.pool, site.table, site.scalings, rows.blocks, rows.num_blocks)
    grid = (lora_tiles + triton.cdiv(n_size, tiling.block_n), splits)
    # With FP8 there are twice as many rows; adapters' tiles stay as for a plain weight.
    least = 8 if operands.scaled > 0 and not num_parts else 16
    block_m = max(least, triton.next_power_of_2(num_rows))
    # Tiles of an adapter's A are as wide as those of an FP8 weight, in more bytes.
    widest = max(weight.itemsize, site.pool.itemsize if num_parts and site is not None else 0)
    num_stages = stages_that_fit(tiling, block_m, x.itemsize, widest)
    _linear[grid](
        x, *operands.rows, x if squares is None else squares, num_pieces, *operands.weight,
        x if bias is None else bias, out, *adapters, num_rows, n_size, k_size, eps, width,
        lora_tiles, SCALED=operands.scaled, GROUP=operands.group, PRECISE=num_rows <= FEW_ROWS,
        HAS_BIAS=bias is not None, NUM_PARTS=num_parts,
        PIECES=triton.next_power_of_2(num_pieces) if num_pieces else 0,
        BLOCK_M=block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        EVEN_K=k_size % tiling.block_k == 0,
        LINES=max(1, tiling.block_k * weight.itemsize // CACHE_LINE_BYTES),
        num_stages=num_stages, num_warps=tiling.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out, term


def stages_that_fit(tiling: Tiling, block_m: int, row_bytes: int, weight_bytes: int) -> int:
    """Tilings are made for bfloat16; of float32 rows fewer stages fit. Bytes are of a number."""
    if row_bytes <= 2:
        return tiling.num_stages
    stage = tiling.block_k * (block_m * row_bytes + tiling.block_n * weight_bytes)
    return min(tiling.num_stages, triton_hopper.SHARED_BYTES // stage)


def _early(
    x: Tensor | Fp8Rows, weight: ScaledMatrix, bias: Tensor | None, *, is_plain: bool
) -> Tensor | None:
    """The product by the kernel that loads weights before the rows, if it supports the shape.
    `is_plain`: without adapters and without a deferred norm."""
    tiling = triton_early.tiling_for(x, weight) if is_plain and bias is None else None
    if tiling is None:
        return None
    if isinstance(x, Tensor) and not triton_early.takes_plain(x, tiling):
        x = in_fp8(x, form_for(x.shape[0], weight, False))
    return triton_early.linear(x, weight, tiling)


@dataclass(frozen=True, slots=True)
class _Operands:
    """A kernel's arguments for rows and a weight."""

    x: Tensor
    """The original rows; unused if no adapter reads them."""
    rows: tuple[Tensor, Tensor]
    """Rows in FP8 and their scales; unused if the weight is plain."""
    weight: tuple[Tensor, Tensor, int]
    """Its numbers, its scales, and the scales per row."""
    scaled: int
    """Columns per scale: 1 means a whole row, 0 no scales; or INT8."""
    group: int
    """Columns per scale of rows; 0: one for all, or none."""

    @property
    def tile_group(self) -> int:
        """Columns over which the scales of rows and of the weight are constant; 0: all."""
        return math.gcd(self.group, 0 if self.scaled == 1 else self.scaled)


def _operands(x: Tensor | Fp8Rows, weight: Matrix) -> _Operands:
    if isinstance(weight, Tensor):
        values = values_of(x)
        return _Operands(values, (values, values), (weight, values, 0), 0, 0)
    if isinstance(weight, Int8Matrix):
        values = values_of(x)
        own = (weight.data, weight.scales, 1)
        return _Operands(values, (values, values), own, INT8.value, 0)
    rows = in_fp8(x, form_for(x.shape[0], weight, True)) if isinstance(x, Tensor) else x
    group = 1 if weight.has_row_scales else weight.group
    scales = weight.scales
    values = rows.data if rows.values is None else rows.values
    return _Operands(
        values, (rows.data, rows.scales), (weight.data, scales, scales.shape[-1]), group,
        0 if rows.scales.shape[1] == 1 else rows.group,
    )  # fmt: skip


def _parts_of(
    x: Tensor | Fp8Rows | DeferredRMSNorm,
) -> tuple[Tensor | Fp8Rows, Tensor | None, int, float]:
    """Rows, sums of squares, their number per row, and the epsilon of the mean."""
    if isinstance(x, DeferredRMSNorm):
        rows = x.values if x.in_fp8 is None else x.in_fp8
        return rows, x.squares, x.squares.shape[1], x.eps
    return x, None, 0, 0.0


def tiling_for(num_rows: int, n_size: int, k_size: int, lora_tiles: int = 0) -> Tiling:
    """The fastest sizes on an H200 (132 multiprocessors), measured inside captured decode steps.

    All programs should run at once. The depth of their pipelines limits how many fit: with 6 stages
    one per multiprocessor, with 4 two, with 3 three.
    """
    tiles = triton.cdiv(n_size, BLOCK_N) + lora_tiles
    if num_rows <= 16:
        fits = ((6, 110, 136), (3, 300, 408), (4, 190, 270))
        # With adapters, splits cost the next kernel more: it adds up twice as many sums.
        for num_stages, fewest, most in fits if not lora_tiles else (fits[0], fits[2], fits[1]):
            for splits in (1, 2, 4):
                if fewest <= tiles * splits <= most and _can_be_cut(k_size, splits):
                    return Tiling(BLOCK_N, BLOCK_K, splits, num_stages, 4)
    if num_rows > MAX_ROWS and tiles > MANY_TILES:
        return Tiling(2 * BLOCK_N, BLOCK_K // 2, 1, 6, 8)
    if lora_tiles and num_rows > SOME_ROWS and tiles - lora_tiles > MANY_TILES:
        # Half as many tiles read the rows half as often, and the rows are as large as a tile.
        return Tiling(2 * BLOCK_N, BLOCK_K // 2, 1, 4, 8)
    # Counts only the weight's own tiles: many adapter tiles do not change the gain.
    splits = 1
    while (tiles - lora_tiles) * splits < 80 and _can_be_cut(k_size, 2 * splits):
        splits *= 2
    return Tiling(BLOCK_N, BLOCK_K, splits, 6 if num_rows <= 16 else 4, 4)


def _scaled_tiling(
    num_rows: int, n_size: int, k_size: int, lora_tiles: int = 0, group: int = 0
) -> Tiling:
    """The same for FP8: half the bytes, and rows with as many bytes as in bfloat16. `group`:
    columns that share a scale and contain whole tiles; 0: all columns."""
    tiles = triton.cdiv(n_size, BLOCK_N) + lora_tiles
    # The adapters' A are in bfloat16; equally wide tiles of them would fill shared memory.
    is_wide = k_size % (2 * BLOCK_K) == 0 and group % (2 * BLOCK_K) == 0 and not lora_tiles
    block_k = 2 * BLOCK_K if is_wide else BLOCK_K
    splits = 1
    if num_rows > FEW_ROWS:
        is_some = num_rows <= SOME_ROWS
        if tiles > MANY_TILES:
            return Tiling(BLOCK_N if is_some else 2 * BLOCK_N, BLOCK_K, 1, 4 if is_some else 3, 4)
        # The next kernel reads every split once more, with one program per row.
        while tiles * splits < 80 and _can_be_cut(k_size, 2 * splits):
            splits *= 2
        if is_some and is_wide:
            return Tiling(BLOCK_N, block_k, splits, 4, 4)
        return Tiling(BLOCK_N, BLOCK_K, splits, 6, 4)
    deep = 1 if is_wide or lora_tiles else 2
    for num_stages, fewest, most in ((3, 300, 400), (4, 190, 270), (5, 110, 136)):
        for splits in (1, 2, 4):
            if fewest <= tiles * splits <= most and _can_be_cut(k_size, splits):
                return Tiling(BLOCK_N, block_k, splits, deep * num_stages, 4)
    splits = 1
    while tiles * splits < 80 and _can_be_cut(k_size, 2 * splits):
        splits *= 2
    return Tiling(BLOCK_N, block_k, splits, 3 * deep, 4)


def _can_be_cut(k_size: int, splits: int) -> bool:
    """Whether every split has some of the inner dimension; equally much if it is even."""
    pieces = -(-k_size // BLOCK_K)
    if k_size % (2 * BLOCK_K) == 0:
        return pieces % splits == 0
    return (splits - 1) * -(-pieces // splits) < pieces
