"""Sorts many tokens' pairs by expert: a counting sort in two launches.

Takes the expert of each pair. Gives a `Routing` whose pairs of one expert are adjacent, in the
order of tokens and without gaps, cut into tiles for `triton_tiles.py`. The host does not learn an
expert's number of pairs: there is room for the most tiles possible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fused_moe.routing import Routing, Tiles
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

CHUNK = 128
"""Pairs that a program reads at once."""
MOST_CHUNKS = 8
FEWEST_BLOCKS = 64
COUNTED_BLOCKS = 32
"""Blocks whose counts are read at once."""


@triton.jit(do_not_specialize=["num_pairs"])
def _count(
    chosen, counts, num_pairs,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The number of pairs of each expert in a block of pairs."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    first = tl.program_id(0) * BLOCK
    for at in range(first, first + BLOCK, CHUNK):
        p = at + tl.arange(0, CHUNK)
        expert = tl.load(chosen + p, mask=p < num_pairs, other=-1)
        total += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * BLOCK_E + e, total)


@triton.jit
def _cut(
    groups, tiles, num_tiles, mine, total, TILE_ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Write expert `mine`'s group, and its tiles after those of earlier experts."""
    e = tl.arange(0, BLOCK_E)
    cuts = (total + TILE_ROWS - 1) // TILE_ROWS
    begin = tl.sum(tl.where(e < mine, total, 0))
    end = begin + tl.sum(tl.where(e == mine, total, 0))
    tl.store(groups + 3 * mine, mine)
    tl.store(groups + 3 * mine + 1, begin)
    tl.store(groups + 3 * mine + 2, end)
    first = tl.sum(tl.where(e < mine, cuts, 0))
    count = tl.sum(tl.where(e == mine, cuts, 0))
    for at in range(0, count, 32):
        t = at + tl.arange(0, 32)
        to = tiles + 3 * (first + t)
        tl.store(to, tl.zeros_like(t) + mine, mask=t < count)
        tl.store(to + 1, begin + t * TILE_ROWS, mask=t < count)
        tl.store(to + 2, tl.minimum(begin + (t + 1) * TILE_ROWS, end), mask=t < count)
    if mine == 0:
        tl.store(num_tiles, tl.sum(cuts))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place(
    chosen, counts, pairs, groups, tiles, num_tiles, num_pairs, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
    TILE_ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per block of pairs, which stores them in order, and one per expert."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    befores = tl.zeros((BLOCK_B, BLOCK_E), tl.int32)
    totals = tl.zeros((BLOCK_B, BLOCK_E), tl.int32)
    for at in range(0, num_blocks, BLOCK_B):
        b = at + tl.arange(0, BLOCK_B)
        ok = (b < num_blocks)[:, None]
        found = tl.load(counts + b[:, None] * BLOCK_E + e[None, :], mask=ok, other=0)
        totals += found
        befores += tl.where((b < block)[:, None], found, 0)
    before = tl.sum(befores, axis=0)
    total = tl.sum(totals, axis=0)
    if block >= num_blocks:
        _cut(groups, tiles, num_tiles, block - num_blocks, total, TILE_ROWS, BLOCK_E)
        return
    place = tl.cumsum(total, axis=0) - total + before
    for at in range(block * BLOCK, (block + 1) * BLOCK, CHUNK):
        p = at + tl.arange(0, CHUNK)
        expert = tl.load(chosen + p, mask=p < num_pairs, other=-1)
        # Sums over two tables: a scan of one table is several times slower.
        mine = expert[:, None] == e[None, :]
        other = at + tl.arange(0, CHUNK)
        others = tl.load(chosen + other, mask=other < num_pairs, other=-1)
        is_before = (expert[:, None] == others[None, :]) & (other[None, :] < p[:, None])
        to = tl.sum(tl.where(mine, place[None, :], 0), axis=1) + tl.sum(is_before.to(tl.int32), 1)
        tl.store(pairs + to, p, mask=p < num_pairs)
        place += tl.sum(mine.to(tl.int32), axis=0)


def ordered(chosen: Tensor, weights: Tensor, num_experts: int, *, tile_rows: int) -> Routing:
    """The routing of tokens that use the experts `chosen`, int32 [num_tokens, top_k]."""
    num_pairs, device = chosen.numel(), chosen.device
    chunks = MOST_CHUNKS
    while chunks > 1 and triton.cdiv(num_pairs, chunks * CHUNK) < FEWEST_BLOCKS:
        chunks //= 2
    num_blocks = triton.cdiv(num_pairs, chunks * CHUNK)
    block_e = triton.next_power_of_2(num_experts)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts, pairs, groups = ints(num_blocks, block_e), ints(num_pairs), ints(num_experts, 3)
    tiles = Tiles(tile_rows, ints(num_pairs // tile_rows + num_experts, 3), ints(1))
    blocks = {"BLOCK": chunks * CHUNK, "CHUNK": CHUNK, "BLOCK_E": block_e, "num_warps": 8}
    _count[(num_blocks,)](chosen, counts, num_pairs, **blocks, **launch_options(device))
    _place[(num_blocks + num_experts,)](
        chosen, counts, pairs, groups, tiles.places, tiles.count, num_pairs, num_blocks,
        BLOCK_B=COUNTED_BLOCKS, TILE_ROWS=tile_rows, **blocks, **launch_options(device),
    )  # fmt: skip
    return Routing(weights, pairs, groups, chosen, tiles)
