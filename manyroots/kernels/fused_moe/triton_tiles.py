"""The experts' two products for many tokens: each expert's pairs in tiles, on matrix units.

Takes a `Routing` that was cut into tiles (`triton_order.py`). `_up` gathers its rows of x and
writes the activations in the order of pairs. `_down` writes each pair's weighted output in the
order of tokens. That output is float32: rounding would lose what a token's experts cancel.

With FP8 weights, rows are rounded to FP8 before either product, as `scaled_gemm` does; adapters
read the original rows. Weights are loaded through tensor descriptors, which cost no registers.
`_down` has a short inner dimension, so its programs are persistent: they load the next tile's
operands while they store the last tile's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from manyroots.kernels.activation.triton_kinds import activated
from manyroots.kernels.fp8_rows import Fp8Form
from manyroots.kernels.fused_moe.adapters import ExpertAdapters
from manyroots.kernels.fused_moe.routing import Routing
from manyroots.kernels.fused_moe.triton_fp4 import FOUR_BITS, operand_of
from manyroots.kernels.fused_moe.triton_products import down_product, gate_and_up
from manyroots.kernels.fused_moe.triton_tile_adapters import (
    RANK_BLOCK,
    expand_part,
    rank_block,
    shrink,
    slots_of,
)
from manyroots.kernels.fused_moe.weights import ExpertMatrix, ExpertWeights
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs
from manyroots.kernels.mxfp4 import TILE, Mxfp4Matrix
from manyroots.kernels.triton_fp8_rows import in_fp8


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tile sizes of a product's output and inner dimension; found by measurement."""

    columns: int
    inner: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TileShapes:
    """Tile sizes of both products."""

    up: TileShape
    down: TileShape


SMALL_ROWS, LARGE_ROWS = 64, 128
SMALL_PAIRS = 56
"""Up to this average number of pairs per expert, small tiles are faster, because reading the
weights dominates."""
SMALL = TileShapes(TileShape(128, 64, 4, 4), TileShape(128, 64, 4, 4))
LARGE = TileShapes(TileShape(128, 64, 4, 8), TileShape(128, 64, 3, 4))
FP8_SMALL = TileShapes(TileShape(128, 128, 4, 4), TileShape(128, 128, 4, 4))
FP8_LARGE = TileShapes(TileShape(128, 128, 4, 8), TileShape(128, 128, 3, 4))
"""For FP8: the same bytes per tile. Not measured yet."""
FP4_SMALL = TileShapes(TileShape(64, TILE, 3, 4), TileShape(128, TILE, 3, 4))
FP4_LARGE = TileShapes(TileShape(64, TILE, 3, 4), TileShape(128, TILE, 3, 8))
FP4_FLOAT32 = TileShapes(TileShape(32, TILE, 1, 8), TileShape(32, TILE, 1, 8))
FLOAT32 = TileShapes(TileShape(32, 16, 2, 8), TileShape(32, 16, 2, 8))
"""Without matrix units, and with half the shared memory."""
DOWN_PROGRAMS = 2
"""Programs of `_down` that fit on a multiprocessor."""


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """The number of pairs of a tile."""
    return SMALL_ROWS if num_pairs <= SMALL_PAIRS * num_experts else LARGE_ROWS


def _shapes(rows: int, dtype: torch.dtype, weights: ExpertWeights) -> TileShapes:
    """The fastest sizes on an H200."""
    if weights.is_fp4 and dtype == torch.float32:
        return FP4_FLOAT32
    if weights.is_fp4:
        return FP4_SMALL if rows <= SMALL_ROWS else FP4_LARGE
    if weights.has_fp8_tiles:
        return FP8_SMALL if rows <= SMALL_ROWS else FP8_LARGE
    if dtype == torch.float32:
        return FLOAT32
    return SMALL if rows <= SMALL_ROWS else LARGE


@triton.jit
def _times(
    acc, xs, weight, x_scales, w_scales, at, x_group, w_group, SCALED: tl.constexpr
):  # fmt: skip
    """acc + xs W^T. With SCALED above 1, that many columns of each share a scale."""
    if SCALED > 1:
        ours = tl.load(x_scales + at // SCALED * x_group)
        theirs = tl.load(w_scales + at // SCALED * w_group)
        return acc + tl.dot(xs, tl.trans(weight)) * (ours[:, None] * theirs[None, :])
    return tl.dot(xs, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _scaled_whole(acc, x_scales, w_scales):
    """Sums of products with one scale per row."""
    return acc * (tl.load(x_scales)[:, None] * tl.load(w_scales)[None, :])


@triton.jit
def _up(
    x, gate_up, bias, pairs, tiles, num_tiles, inner, shrunk, slots, pool, table, x_scales,
    w_scales, n_size, k_size, top_k, x_row, x_group, w_row, w_group,
    KIND: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """activation(gate, up) of a tile's pairs. With FOUR_BITS the weights are the left factor, and
    the product is transposed afterwards: only the left factor can come from registers."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    tiles_n = tl.cdiv(n_size, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    if tile >= tl.load(num_tiles):
        return
    first_n = tl.program_id(0) % tiles_n * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    expert = tl.load(tiles + 3 * tile)
    m = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    is_pair = m < tl.load(tiles + 3 * tile + 2)
    token = tl.load(pairs + m, mask=is_pair, other=0) // top_k
    at_n = expert * 2 * n_size + tl.minimum(n, n_size - 1)
    if SCALED == FOUR_BITS:
        gate, up = gate_and_up(
            x, gate_up, w_scales, w_row, bias, expert.to(tl.int64), token.to(tl.int64), is_pair, n,
            n_size, k_size, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False, SCALED, DEPENDENT,
        )  # fmt: skip
        gate, up = tl.trans(gate), tl.trans(up)
    else:
        k = tl.arange(0, BLOCK_K)[None, :]
        x_at = x + token[:, None].to(tl.int64) * k_size + k
        first_row = expert * 2 * n_size + first_n
        own = x_scales + token * x_row
        gate_scales = w_scales + at_n * w_row
        up_scales = gate_scales + n_size * w_row
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            # Columns past the end of a weight's row are read as zeros.
            # No rows for pairs that are not there: all tiles would ask for those of one token.
            if EVEN_K:
                xs = tl.load(x_at + at, mask=is_pair[:, None], other=0.0)
            else:
                ok = is_pair[:, None] & (at + k < k_size)
                xs = tl.load(x_at + at, mask=ok, other=0.0)
            gates = gate_up.load([first_row, at])
            gate = _times(gate, xs, gates, own, gate_scales, at, x_group, w_group, SCALED)
            ups = gate_up.load([first_row + n_size, at])
            up = _times(up, xs, ups, own, up_scales, at, x_group, w_group, SCALED)
        if SCALED == 1:
            gate = _scaled_whole(gate, own, gate_scales)
            up = _scaled_whole(up, own, up_scales)
    if HAS_BIAS:
        gate += tl.load(bias + at_n).to(tl.float32)[None, :]
        up += tl.load(bias + at_n + n_size).to(tl.float32)[None, :]
    if RANK:
        left = slots_of(slots, token, is_pair)
        columns: tl.constexpr = RANK if RANK < RANK_BLOCK else RANK_BLOCK
        slot = tl.max(left)
        while slot >= 0:
            for first in tl.static_range(0, RANK, columns):
                h, weight = expand_part(
                    shrunk, pool, table, slot, left, m, expert, n, n_size, first, 0, 2, RANK,
                    columns,
                )  # fmt: skip
                up_h, up_weight = expand_part(
                    shrunk, pool, table, slot, left, m, expert, n, n_size, first, 1, 2, RANK,
                    columns,
                )  # fmt: skip
                gate = tl.dot(h, tl.trans(weight), gate, input_precision="ieee")
                up = tl.dot(up_h, tl.trans(up_weight), up, input_precision="ieee")
            left = tl.where(left == slot, -1, left)
            slot = tl.max(left)
    to = inner + m[:, None].to(tl.int64) * n_size + n[None, :]
    tl.store(to, activated(gate, up, KIND), mask=is_pair[:, None] & (n < n_size)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down(
    inner, down, bias, pairs, tiles, num_tiles, weights, out, shrunk, slots, pool, table, x_scales,
    w_scales, n_size, k_size, top_k, num_pairs, x_row, x_group, w_row, w_group,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight * down(inner) of the pairs, tile after tile, stored by pair."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    tiles_n = tl.cdiv(n_size, BLOCK_N)
    total = tl.load(num_tiles) * tiles_n
    for at_tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        tile = at_tile // tiles_n
        first_n = at_tile % tiles_n * BLOCK_N
        expert = tl.load(tiles + 3 * tile)
        begin = tl.load(tiles + 3 * tile + 1)
        end = tl.load(tiles + 3 * tile + 2)
        m = begin + tl.arange(0, BLOCK_M)
        n = first_n + tl.arange(0, BLOCK_N)
        at_n = expert * n_size + tl.minimum(n, n_size - 1)
        if SCALED == FOUR_BITS:
            acc = down_product(
                inner, down, w_scales, w_row, bias, expert.to(tl.int64), m.to(tl.int64), m < end, n,
                n_size, k_size, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False, SCALED, DEPENDENT,
            )  # fmt: skip
            acc = tl.trans(acc)
        else:
            own = x_scales + tl.minimum(m, num_pairs - 1) * x_row
            of_rows = w_scales + at_n * w_row
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for at in range(0, k_size, BLOCK_K):
                weight = down.load([expert * n_size + first_n, at])
                xs = inner.load([begin, at])
                acc = _times(acc, xs, weight, own, of_rows, at, x_group, w_group, SCALED)
            if SCALED == 1:
                acc = _scaled_whole(acc, own, of_rows)
        pair = tl.load(pairs + m, mask=m < end, other=0)
        if HAS_BIAS:
            acc += tl.load(bias + at_n).to(tl.float32)[None, :]
        if RANK:
            left = slots_of(slots, pair // top_k, m < end)
            columns: tl.constexpr = RANK if RANK < RANK_BLOCK else RANK_BLOCK
            slot = tl.max(left)
            while slot >= 0:
                for first in tl.static_range(0, RANK, columns):
                    h, second = expand_part(
                        shrunk, pool, table, slot, left, m, expert, n, n_size, first, 0, 1, RANK,
                        columns,
                    )  # fmt: skip
                    acc = tl.dot(h, tl.trans(second), acc, input_precision="ieee")
                left = tl.where(left == slot, -1, left)
                slot = tl.max(left)
        acc *= tl.load(weights + pair)[:, None]
        # Stored in two halves: a whole tile would take the shared memory of a second program.
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left_half, right_half = tl.split(halves)
        n = first_n + tl.arange(0, BLOCK_N // 2)
        to = out + pair[:, None].to(tl.int64) * n_size + n[None, :]
        is_pair = (m < end)[:, None]
        tl.store(to, left_half, mask=is_pair & (n < n_size)[None, :])
        n += BLOCK_N // 2
        tl.store(to + BLOCK_N // 2, right_half, mask=is_pair & (n < n_size)[None, :])


def experts_in_tiles(
    x: Tensor, routing: Routing, weights: ExpertWeights, adapters: ExpertAdapters | None = None
) -> Tensor:
    """Each pair's weighted output, float32 [tokens, top_k, hidden]."""
    tiles = routing.tiles
    assert tiles is not None, "the routing of few tokens has no tiles"
    hidden_size, n_size = weights.down.shape[1:]
    num_tokens, top_k = routing.weights.shape
    if not (weights.has_fp8_tiles or weights.is_fp4):
        weights = weights.plain(x.dtype)
    cut = _shapes(tiles.rows, x.dtype, weights)
    of_tiles = (routing.pairs, tiles.places, tiles.count)
    num_pairs = num_tokens * top_k
    inner = torch.empty(num_pairs, n_size, dtype=x.dtype, device=x.device)
    most_tiles, options = tiles.places.shape[0], launch_options(x.device)
    up_rank, *of_up = _around(x, routing, adapters, is_up=True)
    operand = _operands(x, weights.gate_up)
    _up[(most_tiles * triton.cdiv(n_size, cut.up.columns),)](
        operand.rows, operand.described_weight(cut.up), weights.up_bias_or(x), *of_tiles, inner,
        *of_up, operand.row_scales, operand.weight_scales, n_size, hidden_size, top_k,
        *operand.strides,
        KIND=weights.activation.value, SCALED=operand.scaled,
        HAS_BIAS=weights.gate_up_bias is not None, EVEN_K=hidden_size % cut.up.inner == 0,
        RANK=up_rank, BLOCK_M=tiles.rows, BLOCK_N=cut.up.columns, BLOCK_K=cut.up.inner,
        num_stages=cut.up.num_stages, num_warps=cut.up.num_warps, **options,
    )  # fmt: skip
    down_rank, *of_down = _around(inner, routing, adapters, is_up=False)
    out = torch.empty(num_tokens, top_k, hidden_size, dtype=torch.float32, device=x.device)
    most = most_tiles * triton.cdiv(hidden_size, cut.down.columns)
    operand = _operands(inner, weights.down)
    _down[(min(most, _multiprocessors(x.device) * DOWN_PROGRAMS),)](
        operand.described_rows(tiles.rows, cut.down), operand.described_weight(cut.down),
        weights.down_bias_or(x),
        *of_tiles, routing.weights, out, *of_down, operand.row_scales, operand.weight_scales,
        hidden_size, n_size, top_k, num_pairs, *operand.strides, SCALED=operand.scaled,
        HAS_BIAS=weights.down_bias is not None, EVEN_K=n_size % cut.down.inner == 0,
        RANK=down_rank, BLOCK_M=tiles.rows, BLOCK_N=cut.down.columns, BLOCK_K=cut.down.inner,
        num_stages=cut.down.num_stages, num_warps=cut.down.num_warps, **options,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Operands:
    """The factors of a product."""

    rows: Tensor
    weight: Tensor
    row_scales: Tensor
    weight_scales: Tensor
    strides: tuple[int, ...]
    """Strides of the scales: by row and by group, for rows and for weights."""
    scaled: int
    """Columns per scale: 1 means a whole row, 0 no scales; or FOUR_BITS."""

    def described_rows(self, rows: int, cut: TileShape) -> Tensor | TensorDescriptor:
        """The rows, as a kernel reads them in tiles."""
        if self.scaled == FOUR_BITS.value:
            return self.rows
        return _described(self.rows, rows, cut.inner)

    def described_weight(self, cut: TileShape) -> Tensor | TensorDescriptor:
        """The same for the weight."""
        if self.scaled == FOUR_BITS.value:
            return self.weight
        return _described(self.weight, cut.columns, cut.inner)


def _operands(x: Tensor, weight: ExpertMatrix) -> _Operands:
    """Rows and a weight unchanged, or both in FP8 if the weight is."""
    if isinstance(weight, Mxfp4Matrix):
        words, exponents, in_row, scaled = operand_of(weight, x)
        return _Operands(x, words, x, exponents, (0, 0, in_row, 1), scaled)
    if isinstance(weight, Tensor):
        return _Operands(x, weight, x, weight, (0, 0, 0, 0), 0)
    rounded = in_fp8(x, Fp8Form(1, weight.group)).rounded
    strides = (*rounded.scales.stride(), *weight.scales.stride()[-2:])
    group = 1 if weight.has_row_scales else weight.group
    return _Operands(rounded.data, weight.data, rounded.scales, weight.scales, strides, group)


def _around(
    x: Tensor, routing: Routing, adapters: ExpertAdapters | None, *, is_up: bool
) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """A product's arguments for adapters. Without adapters: 0, then unused values. Otherwise: the
    ranks of a part in the shrink of x, the shrink, and the addresses of B."""
    if adapters is None or routing.tiles is None:
        return 0, x, x, x, x
    site = adapters.gate_up if is_up else adapters.down
    slots = adapters.rows.slots
    shrunk = shrink(x, routing, routing.tiles, site, slots)
    return rank_block(site.max_rank), shrunk, slots, site.pool, site.table


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, or one matrix per expert below each other, read in pieces of that size."""
    return TensorDescriptor.from_tensor(matrix.view(-1, matrix.shape[-1]), [rows, columns])


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
