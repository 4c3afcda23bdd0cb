"""A few rows times a large weight: a kernel that reads the weight as fast as memory gives it.

Same signatures as `reference.py`. The weight is the matrix instruction's left operand, so that 16
rows cost no more than one. The inner dimension may be cut into splits, which give partial sums to
the next kernel. FP8 weights are multiplied as they are, with rows in two FP8 numbers each
(`fp8_rows.py`). The adapters' A are further tiles of the same launch: their bytes cost what bytes
cost, their arithmetic nothing. So steps of up to 128 rows with adapters are multiplied here, too;
without, narrow weights alone. While the kernel before this one still runs,
a program's first tile of the weight is already on its way into the cache; asking for more made
steps slower. Shapes that `triton_hopper.py` is faster with go there.
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
from manyroots.kernels.lora_ops.sites import RANK_STEP, LinearSite, LoraRows, LoraTerm
from manyroots.kernels.norm.deferred import DeferredRMSNorm
from manyroots.kernels.scaled import SIDE_STEP, Int8Matrix, Matrix, ScaledMatrix
from manyroots.kernels.triton_fp8_rows import in_fp8

ROWS_AT_ONCE: int | None = None
MAX_ROWS, MAX_NARROW_ROWS = 64, 128
BLOCK_N = 64
BLOCK_K = 128
FEW_ROWS = 16
"""Up to which a product with FP8 adds up in float32 at no cost."""
SOME_ROWS = 32
"""Up to which rows leave room for wide tiles."""
INT8: tl.constexpr = tl.constexpr(-1)
"""What SCALED is where a weight is in INT8: rows are multiplied as they are."""
INNER_STEP = 8
"""The inner dimension is a multiple of it, so that rows are whole 16-byte loads."""
CACHE_LINE_BYTES = 128
MANY_TILES = 264
"""Of 64 rows of a weight: more than two for each multiprocessor."""
NARROW_TILES, WIDEST_TILES = 66, 1024
"""Of the same: two halves of each fit at once, and more than any product has but the head's."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one shape is cut up; found by measurement."""

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
    """`_product` with W in FP8 and rows in two numbers of it each, which are rows of one operand.

    `scales` is where each row of W has its own, one for SCALED columns; 1: one for all. Rows have a
    scale for each GROUP columns; 0: one for all. The matrix instructions of FP8 keep sums to some
    14 bits. Where scales differ from tile to tile, or PRECISE asks for it, a tile's sums are added
    up in float32; otherwise the error is less than that of a product in bfloat16."""
    both = tl.arange(0, 2 * BLOCK_M)
    row = both % BLOCK_M
    is_row = row < num_rows
    k = tl.arange(0, BLOCK_K)
    x_at = parts + (both // BLOCK_M * num_rows + row)[:, None] * k_size + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, 2 * BLOCK_M), tl.float32)
    # Read a tile ahead: a scale that a sum waited for would cost as much as the tile.
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
        # Masked, not clamped: a hundred programs reading one row many times would queue for it.
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
    """Products with rows that their norm left undivided, divided."""
    return acc * tl.rsqrt(tl.sum(of_pieces, axis=1) / k_size + eps)[None, :]


@triton.jit
def _shrink_tile(
    x, squares, num_pieces, hidden, pool, table, scalings, blocks, num_blocks, tile, split, first,
    last, num_rows, k_size, eps, width,
    NUM_PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The adapters' A, one block's after the other's, as further tiles of weights.

    Each of a tile's rows knows its block of rows of x, and is stored for those alone.
    """
    v = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Eight ranks at a time are of one adapter.
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
        # Adapters may leave this product alone.
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
        # Of the first split alone: the others' sums are added to its.
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
    """Whether `linear` computes this. Up to MAX_ROWS a product is bound by reading its weight, and
    it reads that faster than the library does. Up to MAX_NARROW_ROWS it still does where a weight
    has few rows, or where the adapters' A come with it; beyond, it is the library's."""
    if isinstance(weight, Tensor):
        if weight.shape[1] % INNER_STEP:
            return False
        return num_rows <= MAX_ROWS or _is_for_many(num_rows, weight, has_adapters)
    if isinstance(weight, Int8Matrix):  # the library would need it as numbers first
        return num_rows <= MAX_NARROW_ROWS and weight.shape[1] % SIDE_STEP == 0
    # Rows of bytes are whole 16-byte loads, and a tile lies within a group of columns.
    fits = weight.has_row_scales or weight.group % BLOCK_K == 0
    return num_rows <= MAX_ROWS and weight.shape[1] % SIDE_STEP == 0 and fits


def _is_for_many(num_rows: int, weight: Tensor, has_adapters: bool) -> bool:
    if num_rows > MAX_NARROW_ROWS or weight.itemsize > 2:
        return False
    tiles = triton.cdiv(weight.shape[0], BLOCK_N)
    return tiles <= NARROW_TILES or (has_adapters and tiles <= WIDEST_TILES)


def form_for(num_rows: int, weight: ScaledMatrix, keeps_values: bool) -> Fp8Form:
    """What `linear` wants rows in, where it computes this. Up to FEW_ROWS scales of groups of
    columns cost less than a kernel that finds one for a row."""
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
    """x [rows, k] times weight [n, k] transposed, and a bias [n], as partial sums [splits, rows, n]
    in float32 or one product in x's dtype; and, given a site, what its adapters shrink x to."""
    rows_in, squares, num_pieces, eps = _parts_of(x)
    num_rows, k_size = rows_in.shape
    n_size = weight.shape[0]
    is_whole = squares is None and (site is None or rows is None)
    if is_whole and isinstance(rows_in, Tensor) and isinstance(weight, Tensor):
        tiling = tiling or triton_hopper.tiling_for(rows_in, weight)
        if isinstance(tiling, RingTiling):
            return triton_hopper.multiply(rows_in, weight, tiling, bias), None
    assert not isinstance(tiling, RingTiling), "of whole rows without adapters alone"
    if tiling is None and isinstance(weight, ScaledMatrix):
        found = _early(rows_in, weight, bias, is_plain=squares is None and rows is None)
        if found is not None:
            return found, None
    operands = _operands(rows_in, weight)
    x = operands.x
    if tiling is None:
        wanted = 0 if site is None or rows is None else rows.max_blocks * site.width
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
        # One sum is as precise as what is multiplied with it; parts are not to be rounded.
        kept = site.pool.dtype if splits == 1 else torch.float32
        hidden = torch.empty(splits, num_rows, width, dtype=kept, device=x.device)
        term = LoraTerm(hidden, site, rows)
        lora_tiles = triton.cdiv(rows.max_blocks * width, tiling.block_n)
        adapters = (hidden, site.pool, site.table, site.scalings, rows.blocks, rows.num_blocks)
    grid = (lora_tiles + triton.cdiv(n_size, tiling.block_n), splits)
    # Of FP8, rows are twice as many; adapters' tiles are as those of a plain weight.
    least = 8 if operands.scaled > 0 and not num_parts else 16
    block_m = max(least, triton.next_power_of_2(num_rows))
    num_stages = tiling.num_stages
    if x.itemsize > 2:  # tilings are made for bfloat16; fewer stages of float32 rows fit
        stage = tiling.block_k * (block_m * x.itemsize + tiling.block_n * weight.itemsize)
        num_stages = min(num_stages, triton_hopper.SHARED_BYTES // stage)
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


def _early(
    x: Tensor | Fp8Rows, weight: ScaledMatrix, bias: Tensor | None, *, is_plain: bool
) -> Tensor | None:
    """The product by the kernel to which weights come before the rows, where that has it.
    `is_plain`: without adapters and what a norm left undone."""
    tiling = triton_early.tiling_for(x, weight) if is_plain and bias is None else None
    if tiling is None:
        return None
    if isinstance(x, Tensor) and not triton_early.takes_plain(x, tiling):
        x = in_fp8(x, form_for(x.shape[0], weight, False))
    return triton_early.linear(x, weight, tiling)


@dataclass(frozen=True, slots=True)
class _Operands:
    """What a kernel is given of rows and a weight."""

    x: Tensor
    """Rows as they were; of no account where nobody reads them."""
    rows: tuple[Tensor, Tensor]
    """Rows in FP8 and their scales, of no account where the weight is plain."""
    weight: tuple[Tensor, Tensor, int]
    """Its numbers, its scales, and how many of those a row has."""
    scaled: int
    """For how many columns each is: 1 stands for all of a row, 0 for no scales; or INT8."""
    group: int
    """For how many columns rows have a scale; 0: one for all, or none."""

    @property
    def tile_group(self) -> int:
        """Of columns whose scales are the same, of rows and of the weight; 0: all."""
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
    """Rows, sums of squares, how many of those a row has, and what is added to their mean."""
    if isinstance(x, DeferredRMSNorm):
        rows = x.values if x.in_fp8 is None else x.in_fp8
        return rows, x.squares, x.squares.shape[1], x.eps
    return x, None, 0, 0.0


def tiling_for(num_rows: int, n_size: int, k_size: int, lora_tiles: int = 0) -> Tiling:
    """What was fastest on an H200 (132 multiprocessors), measured inside captured decode steps.

    All programs should run at once. How many fit depends on how deep their pipelines are: 6 stages
    leave room for one per multiprocessor, 4 for two, 3 for three.
    """
    tiles = triton.cdiv(n_size, BLOCK_N) + lora_tiles
    if num_rows <= 16:
        fits = ((6, 110, 136), (3, 300, 408), (4, 190, 270))
        # With adapters, splits cost their readers more: twice as many sums to add up.
        for num_stages, fewest, most in fits if not lora_tiles else (fits[0], fits[2], fits[1]):
            for splits in (1, 2, 4):
                if fewest <= tiles * splits <= most and _can_be_cut(k_size, splits):
                    return Tiling(BLOCK_N, BLOCK_K, splits, num_stages, 4)
    if num_rows > MAX_ROWS and tiles > MANY_TILES:
        return Tiling(2 * BLOCK_N, BLOCK_K // 2, 1, 6, 8)
    if lora_tiles and num_rows > SOME_ROWS and tiles - lora_tiles > MANY_TILES:
        # Half as many tiles read the rows half as often, which are as large as a tile.
        return Tiling(2 * BLOCK_N, BLOCK_K // 2, 1, 4, 8)
    # By the weight's own tiles: many more of adapters make it no less worth while.
    splits = 1
    while (tiles - lora_tiles) * splits < 80 and _can_be_cut(k_size, 2 * splits):
        splits *= 2
    return Tiling(BLOCK_N, BLOCK_K, splits, 6 if num_rows <= 16 else 4, 4)


def _scaled_tiling(
    num_rows: int, n_size: int, k_size: int, lora_tiles: int = 0, group: int = 0
) -> Tiling:
    """The same of FP8: half of the bytes, and rows that take as many as in bfloat16. `group`: of
    columns that share a scale, in which tiles lie; 0: all do."""
    tiles = triton.cdiv(n_size, BLOCK_N) + lora_tiles
    # The adapters' A are in bfloat16, and as wide tiles of them would fill the room.
    is_wide = k_size % (2 * BLOCK_K) == 0 and group % (2 * BLOCK_K) == 0 and not lora_tiles
    block_k = 2 * BLOCK_K if is_wide else BLOCK_K
    splits = 1
    if num_rows > FEW_ROWS:
        is_some = num_rows <= SOME_ROWS
        if tiles > MANY_TILES:
            return Tiling(BLOCK_N if is_some else 2 * BLOCK_N, BLOCK_K, 1, 4 if is_some else 3, 4)
        # Every split is read once more by the next kernel, a row of which has one program.
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
    """Whether every split has some of the inner dimension; equally much where it is even."""
    pieces = -(-k_size // BLOCK_K)
    if k_size % (2 * BLOCK_K) == 0:
        return pieces % splits == 0
    return (splits - 1) * -(-pieces // splits) < pieces
