"""Which products `triton_hopper.py` takes, and how it cuts them up: what was fastest on an H200.

All blocks of all tiles of a weight are one sequence, tile after tile. Programs have equal shares of
it: a tile each, a part of one, several, or what is left of one and the beginning of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from manyroots.kernels.fp8_rows import Fp8Rows
from manyroots.kernels.scaled import Matrix, ScaledMatrix

MAX_ROWS = 64
"""Beyond it other products are faster."""
FEW_ROWS, SOME_ROWS = 16, 32
"""Between them products in bfloat16 were not measured, and are not taken."""
BLOCK_K = 128
"""Columns of a block."""
PIECE = 64
"""Rows of the weight that one matrix instruction has."""
INNER_STEP = 8
"""Rows of a weight in bfloat16 begin at multiples of 16 bytes: the copy engine's."""
SHARED_BYTES, LEFT_BYTES = 232_448, 20_480
"""What a program may have of shared memory, and what it leaves of it to the programs of the next
kernel, which begin beside it; of FEW_ROWS it leaves nothing."""
MULTIPROCESSORS, FEWEST, MANY = 132, 96, 4
"""Of an H200; fewer programs leave too much of it idle; and how many tiles each must have where
they are taken in turn."""
CUTS = ((1, 1), (1, 2), (3, 1))
"""Pieces of a tile and splits, the first that fits. The first is slower than `triton.py` for few
rows."""
MOST_STEPS = 16
"""Blocks of a share whose rows a program rounds itself."""


@dataclass(frozen=True, slots=True)
class RingTiling:
    """How one product is cut up."""

    pieces: int
    """Of a tile; each is a copy and an accumulator of its own."""
    piece: int
    """Rows of the weight in each."""
    num_blocks: int
    """Of a tile. There may be one too many, so that shares are alike; it is read as zeros."""
    share: int
    """Of a program, in blocks; such that every tile is in as many parts."""
    num_stages: int
    """Blocks that are there or on their way."""
    num_warps: int = 4

    @property
    def tile(self) -> int:
        return self.pieces * self.piece

    @property
    def num_splits(self) -> int:
        return -(-self.num_blocks // self.share)


def tiling_for(
    x: Tensor | Fp8Rows, weight: Matrix, *, on_hopper: bool | None = None
) -> RingTiling | None:
    """How this product is cut up, if the kernel takes it and was measured to be faster: on Hopper,
    in bfloat16 or with a weight in FP8 that has a scale for each of its rows."""
    data = weight if isinstance(weight, Tensor) else weight.data
    is_here = is_hopper(data.device) if on_hopper is None else on_hopper
    if not is_here or x.dtype is not torch.bfloat16 or x.shape[0] > MAX_ROWS:
        return None
    num_rows, (n_size, k_size) = x.shape[0], weight.shape
    if isinstance(weight, ScaledMatrix):
        fits = weight.has_row_scales and k_size % BLOCK_K == 0
        return _scaled_tiling(num_rows, -(-n_size // PIECE), k_size // BLOCK_K) if fits else None
    if not isinstance(x, Tensor) or weight.dtype is not torch.bfloat16:
        return None
    fits = x.is_contiguous() and weight.is_contiguous() and k_size % INNER_STEP == 0
    return _plain_tiling(num_rows, n_size, -(-k_size // BLOCK_K)) if fits else None


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def block_m(num_rows: int, least: int) -> int:
    """Rows that a matrix instruction has: a power of two."""
    return max(least, 1 << (num_rows - 1).bit_length())


def takes_plain(num_rows: int, tiling: RingTiling) -> bool:
    """Whether a product in FP8 may have its rows as they are."""
    return num_rows <= FEW_ROWS and tiling.share <= MOST_STEPS


def _plain_tiling(num_rows: int, n_size: int, num_blocks: int) -> RingTiling | None:
    """Of bfloat16. A program fills a multiprocessor, and all should have one; many tiles are taken
    in turn by as many programs as there are."""
    if FEW_ROWS < num_rows <= SOME_ROWS:
        return None
    for pieces, splits in CUTS if num_rows > FEW_ROWS else CUTS[1:]:
        tiles = -(-n_size // (pieces * PIECE))
        if not FEWEST <= tiles * splits <= MULTIPROCESSORS or num_blocks < 4 * splits:
            continue
        if (pieces, splits) == (1, 1) and 4 * tiles <= 3 * MULTIPROCESSORS and num_blocks % 4 == 0:
            # Four programs for three tiles, each of which is then two programs'.
            return _ring(num_rows, pieces, num_blocks, num_blocks * 3 // 4)
        share = -(-num_blocks // splits)
        return _ring(num_rows, pieces, splits * share, share)
    pieces = CUTS[-1][0]
    tiles = -(-n_size // (pieces * PIECE))
    if tiles < MANY * MULTIPROCESSORS:
        return None
    return _ring(num_rows, pieces, num_blocks, -(-tiles // MULTIPROCESSORS) * num_blocks)


def _ring(num_rows: int, pieces: int, num_blocks: int, share: int) -> RingTiling:
    """With as many stages as there is room for."""
    room = SHARED_BYTES - 1024 - (LEFT_BYTES if num_rows > FEW_ROWS else 0)
    stages = room // (2 * BLOCK_K * (pieces * PIECE + block_m(num_rows, 16)))
    return RingTiling(pieces, PIECE, num_blocks, share, stages)


def _scaled_tiling(num_rows: int, tiles: int, num_blocks: int) -> RingTiling | None:
    """Of FP8, of what was compared with float64, with norms, activations and as many bytes as
    attention reads between the products. `tiles`: of 64 rows of the weight."""
    piece, splits, stages, warps = _scaled_cut(num_rows, tiles, num_blocks)
    while num_blocks % splits or num_blocks < 2 * splits:
        if splits == 1:
            return None
        splits //= 2
    share = num_blocks // splits
    return RingTiling(1, piece, num_blocks, share, min(stages, share), warps)


def _scaled_cut(num_rows: int, tiles: int, num_blocks: int) -> tuple[int, int, int, int]:
    """Rows of the weight in a tile, splits, stages, and warps."""
    if num_rows <= FEW_ROWS:
        if tiles > 2 * MULTIPROCESSORS:
            return 128, 1, 6, 4
        if tiles > MULTIPROCESSORS // 2:
            return 64, 4, 5, 4
        return 64, 4, 6 if num_blocks <= 32 else 7, 4
    if tiles > 2 * MULTIPROCESSORS:
        return (64, 1, 4, 4) if num_rows <= SOME_ROWS else (128, 1, 3, 8)
    stages = 6 if num_rows <= SOME_ROWS else 4
    return 64, 4 if tiles <= MULTIPROCESSORS // 2 else 2, stages, 4
