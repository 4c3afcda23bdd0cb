"""Some rows times a large weight on Hopper GPUs, in Gluon; loads weights before the rows are ready.

Same signature as `reference.py`, for inputs that `is_for` accepts; `triton.py` takes the rest. A
program has a tile of the weight and two parts that run concurrently:

    one warp      asks the copy engine for blocks of the weight and of the rows, into a ring
    4 or 8 warps  multiply what has come; the weight is the matrix instruction's left operand

Weights are constant in a step. The ring is therefore filled with them while the previous kernel
still runs (`launch.py`), so the work between two products leaves memory idle for less time.
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

from manyroots.kernels.launch import is_hopper, launch_options

COPY_REGISTERS = gl.constexpr(24)
MAX_ROWS, FEW_ROWS, UNMEASURED_ROWS = 64, 16, 32
"""Above the first limit other products are faster. Between the second and the third the kernel was
not measured, and is not used."""
INNER_STEP = 8
"""Rows of the weight start at multiples of 16 bytes, as the copy engine requires."""
PIECE, BLOCK_K = 64, 128
SHARED_BYTES = 232_448
"""Most shared memory of a program."""
MULTIPROCESSORS, FEWEST, MANY = 132, 96, 4
"""Multiprocessors of an H200; the fewest programs, since fewer leave too many of them idle; and the
fewest tiles of each program if programs take several."""
CUTS = ((1, 1), (1, 2), (3, 1))
"""Pieces of a tile and splits; the first that fits is used. The first is slower than `triton.py`
for few rows."""
# Triton 3.6's name
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@dataclass(frozen=True, slots=True)
class RingTiling:
    """Tile sizes for one shape; found by measurement."""

    pieces: int
    """Pieces of a tile; each has its own copy and accumulator."""
    piece: int
    """Rows of the weight in each piece."""
    block_k: int
    num_stages: int
    """Blocks that are loaded or being loaded."""
    num_splits: int
    num_warps: int
    registers: int
    """Registers of a thread at the start of the program."""
    max_programs: int = 0
    """With more tiles than this, programs take several tiles each; 0: one tile each."""

    @property
    def tile(self) -> int:
        return self.pieces * self.piece


@gluon.jit
def _blocks_of(split, num_blocks, num_splits):
    """A split's blocks of the inner dimension: the first, and the one after the last."""
    return split * num_blocks // num_splits, (split + 1) * num_blocks // num_splits


@gluon.jit
def _ask_for_weights(
    w_desc, ring, stage, n, k, PIECES: gl.constexpr, PIECE: gl.constexpr
):  # fmt: skip
    for p in gl.static_range(PIECES):
        _load(w_desc, [n + p * PIECE, k], ring[2].index(stage), ring[1].index(stage * PIECES + p))


@gluon.jit
def _copy(
    x_desc, w_desc, ring, sizes, BLOCK_K: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The role of the single warp: load."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    xs, full, empty = ring[0], ring[2], ring[3]
    num_blocks, num_splits, num_tiles = sizes[2], sizes[3], sizes[4]
    num_bytes: gl.constexpr = PIECES * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    tile: gl.constexpr = PIECES * PIECE
    first, last = _blocks_of(program // num_tiles, num_blocks, num_splits)
    early = gl.minimum(last - first, STAGES)
    for i in range(early):
        mbarrier.expect(full.index(i), num_bytes)
        _ask_for_weights(
            w_desc, ring, i, program % num_tiles * tile, (first + i) * BLOCK_K, PIECES, PIECE
        )
    if DEPENDENT:
        gdc_wait()
    for i in range(early):
        _load(x_desc, [0, (first + i) * BLOCK_K], full.index(i), xs.index(i))
    at = early
    begin = first + early
    for item in range(program, num_tiles * num_splits, num_programs):
        first, last = _blocks_of(item // num_tiles, num_blocks, num_splits)
        for block in range(gl.where(item == program, begin, first), last):
            stage = at % STAGES
            mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), num_bytes)
            _ask_for_weights(
                w_desc, ring, stage, item % num_tiles * tile, block * BLOCK_K, PIECES, PIECE
            )
            _load(x_desc, [0, block * BLOCK_K], full.index(stage), xs.index(stage))
            at += 1


@gluon.jit
def _all_but(few: gl.constexpr, sums, PIECES: gl.constexpr):
    """A tile's sums when all but a few products are done."""
    done = warpgroup_mma_wait(few, deps=sums)
    return (done,) if PIECES == 1 else done


@gluon.jit
def _multiply(
    ring, sizes, bias, out, BLOCK_M: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr,
    STAGES: gl.constexpr, WAVES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """The role of the other warps: multiply."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WAVES], [16, BLOCK_M // WAVES, 16])
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    xs, tiles, full, empty = ring
    num_rows, n_size, num_blocks, num_splits, num_tiles = sizes
    at = 0
    for item in range(program, num_tiles * num_splits, num_programs):
        tile, split = item % num_tiles, item // num_tiles
        first, last = _blocks_of(split, num_blocks, num_splits)
        acc = ()
        for _ in gl.static_range(PIECES):
            acc += (gl.zeros([PIECE, BLOCK_M], gl.float32, layout),)  # type: ignore[assignment]
        for block in range(first, last):
            stage = at % STAGES
            mbarrier.wait(full.index(stage), at // STAGES & 1)
            sums = ()
            for p in gl.static_range(PIECES):
                sums += (  # type: ignore[assignment]
                    warpgroup_mma(
                        tiles.index(stage * PIECES + p), xs.index(stage).permute((1, 0)), acc[p],
                        is_async=True,
                    ),
                )  # fmt: skip
            # The previous block is multiplied by now, so its slot is free.
            acc = _all_but(PIECES, sums, PIECES)
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=block > first)
            at += 1
        acc = _all_but(0, acc, PIECES)
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
        for p in gl.static_range(PIECES):
            n = (tile * PIECES + p) * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
            total = acc[p]
            if HAS_BIAS:
                # Added to the first split only: the other splits' sums are added to it.
                biased = gl.where(split == 0, n_size, 0)
                total += gl.load(bias + n, mask=n < biased, other=0.0).to(gl.float32)[:, None]
            to = out + (split * num_rows + m[None, :]).to(gl.int64) * n_size + n[:, None]
            gl.store(
                to, total.to(out.dtype.element_ty),
                mask=(m < num_rows)[None, :] & (n < n_size)[:, None],
            )  # fmt: skip


@gluon.jit
def _barriers(num: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit(
    # Compiled once for all steps and shapes, because compiling takes seconds.
    do_not_specialize=["num_rows", "n_size", "num_blocks", "num_splits", "num_tiles"],
    do_not_specialize_on_alignment=["bias"],
)
def _linear(
    x_desc, w_desc, bias, out, num_rows, n_size, num_blocks, num_splits, num_tiles,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr,
    STAGES: gl.constexpr, WAVES: gl.constexpr, HAS_BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    dtype: gl.constexpr = w_desc.dtype
    # Rows and weights; for each block a barrier for 'loaded' and one for 'multiplied'.
    ring = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES * PIECES, PIECE, BLOCK_K], w_desc.layout),
        _barriers(STAGES), _barriers(STAGES),
    )  # fmt: skip
    fence_async_shared()
    sizes = (num_rows, n_size, num_blocks, num_splits, num_tiles)
    gl.warp_specialize(
        [
            (_multiply, (ring, sizes, bias, out, BLOCK_M, PIECES, PIECE, STAGES, WAVES, HAS_BIAS)),
            (_copy, (x_desc, w_desc, ring, sizes, BLOCK_K, PIECES, PIECE, STAGES, DEPENDENT)),
        ],
        [1], [COPY_REGISTERS],
    )  # fmt: skip


def tiling_for(x: Tensor, weight: Tensor) -> RingTiling | None:
    """The tiling of this product, if this kernel supports it and was measured to be faster."""
    if (
        not is_hopper(x.device)
        or not x.dtype == weight.dtype == torch.bfloat16
        or not x.is_contiguous()
        or not weight.is_contiguous()
    ):
        return None
    return _tiling(x.shape[0], *weight.shape)


def _tiling(num_rows: int, n_size: int, k_size: int) -> RingTiling | None:
    """The fastest sizes on an H200. A program fills a multiprocessor, and each should have one.
    Many tiles are distributed over as many programs as there are multiprocessors."""
    if num_rows > MAX_ROWS or FEW_ROWS < num_rows <= UNMEASURED_ROWS or k_size % INNER_STEP:
        return None
    for pieces, splits in CUTS if num_rows > FEW_ROWS else CUTS[1:]:
        tiles = triton.cdiv(n_size, pieces * PIECE)
        if FEWEST <= tiles * splits <= MULTIPROCESSORS and k_size >= 4 * splits * BLOCK_K:
            return _ring(num_rows, pieces, splits)
    pieces = CUTS[-1][0]
    if triton.cdiv(n_size, pieces * PIECE) >= MANY * MULTIPROCESSORS:
        return _ring(num_rows, pieces, 1, MULTIPROCESSORS)
    return None


def _ring(num_rows: int, pieces: int, splits: int, max_programs: int = 0) -> RingTiling:
    """As many stages as fit. Registers are those of the sums plus some, half of them of copying
    warps, but at least what one matrix instruction names."""
    block_m = _block_m(num_rows)
    stages = (SHARED_BYTES - 1024) // (2 * BLOCK_K * (pieces * PIECE + block_m))
    mean = (pieces * PIECE * block_m // 128 + 56 + COPY_REGISTERS.value) // 2
    registers = -(-max(48, mean, block_m // 2 + 27) // 8) * 8
    return RingTiling(pieces, PIECE, BLOCK_K, stages, splits, 4, registers, max_programs)


def _block_m(num_rows: int) -> int:
    size: int = max(16, triton.next_power_of_2(num_rows))
    return size


def multiply(x: Tensor, weight: Tensor, tiling: RingTiling, bias: Tensor | None) -> Tensor:
    """`gemm.linear` of whole rows, without adapters."""
    num_rows, k_size = x.shape
    n_size, splits = weight.shape[0], tiling.num_splits
    out = torch.empty(
        splits, num_rows, n_size, dtype=x.dtype if splits == 1 else torch.float32, device=x.device
    )
    num_tiles = triton.cdiv(n_size, tiling.tile)
    programs = num_tiles * splits
    if tiling.max_programs:
        programs = min(programs, tiling.max_programs)
    block_m = _block_m(num_rows)
    _linear[(programs,)](
        _describe(x, block_m, tiling.block_k), _describe(weight, tiling.piece, tiling.block_k),
        x if bias is None else bias, out, num_rows, n_size, triton.cdiv(k_size, tiling.block_k),
        splits, num_tiles, BLOCK_M=block_m, BLOCK_K=tiling.block_k, PIECES=tiling.pieces,
        PIECE=tiling.piece, STAGES=tiling.num_stages, WAVES=tiling.num_warps // 4,
        HAS_BIAS=bias is not None, num_warps=tiling.num_warps, maxnreg=tiling.registers,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tensor descriptor of a matrix for the copy engine: its shape, and boxes of this many rows."""
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], _layout(rows, columns)
    )


@lru_cache(maxsize=64)
def _layout(rows: int, columns: int) -> object:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
