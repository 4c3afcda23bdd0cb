"""Adapters of experts for many tokens, in Triton.

Many pairs of a tile share an adapter's matrix, and pairs of one adapter are adjacent. A tile
therefore applies its adapters one after the other, each to its own rows. `shrink` is a launch
before each product; `expand_part` belongs to the products of `triton_tiles.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.fused_moe.adapters import PART_WIDTH, ExpertSite
from manyroots.kernels.fused_moe.routing import Routing, Tiles
from manyroots.kernels.launch import launch_options, let_next_begin, wait_for_inputs

SHRINK_ROWS = 64
WIDE_BYTES = 512
"""Bytes of all ranks of a site. With more, less of the inner dimension fits into shared memory."""
RANK_BLOCK = tl.constexpr(64)
"""Most ranks that are multiplied at once."""
_PART_WIDTH = tl.constexpr(PART_WIDTH)


def rank_block(max_rank: int) -> int:
    """Columns of one part of a site in the shrink of x."""
    return max(16, int(triton.next_power_of_2(max_rank)))


@triton.jit
def slots_of(slots, token, is_pair):
    """The adapter of each pair of a tile; -1 for none."""
    return tl.where(is_pair, tl.load(slots + token), -1)


@triton.jit
def _shrink(
    x, out, pairs, tiles, num_tiles, slots, pool, table, scalings, k_size, top_k, per_tile,
    BY_PAIR: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """scaling * A x of a tile's pairs, in the order of pairs: [num_pairs, NUM_PARTS * RANK]."""
    let_next_begin(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    tile = tl.program_id(0) // per_tile
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    begin = tl.load(tiles + 3 * tile + 1) + tl.program_id(0) % per_tile * BLOCK_M
    m = begin + tl.arange(0, BLOCK_M)
    is_pair = m < tl.load(tiles + 3 * tile + 2)
    token = tl.load(pairs + m, mask=is_pair, other=0) // top_k
    left = slots_of(slots, token, is_pair)
    row = (m if BY_PAIR else token).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * k_size + k[None, :]
    c = tl.arange(0, NUM_PARTS * RANK)
    to = out + m[:, None].to(tl.int64) * (NUM_PARTS * RANK) + c[None, :]
    slot = tl.max(left)
    while slot >= 0:
        part = slot * NUM_PARTS + c // RANK
        entry = table + part * _PART_WIDTH
        ok = (c % RANK < tl.load(entry + 2).to(tl.int32))[:, None]
        a = tl.load(entry) + expert * tl.load(entry + 1) + (c % RANK).to(tl.int64) * k_size
        a_at = (pool + tl.multiple_of(a, 8))[:, None] + k[None, :]
        mine = (left == slot)[:, None]
        acc = tl.zeros((BLOCK_M, NUM_PARTS * RANK), tl.float32)
        for at in range(0, k_size, BLOCK_K):
            inside = (at + k < k_size)[None, :]
            xs = tl.load(x_at + at, mask=mine & inside, other=0.0)
            weight = tl.load(a_at + at, mask=ok & inside, other=0.0)
            acc = tl.dot(xs, tl.trans(weight), acc, input_precision="ieee")
        tl.store(to, acc * tl.load(scalings + part)[None, :], mask=mine)
        left = tl.where(left == slot, -1, left)
        slot = tl.max(left)


def shrink(x: Tensor, routing: Routing, tiles: Tiles, site: ExpertSite, slots: Tensor) -> Tensor:
    """scaling * A x of every pair, in the order of `routing.pairs`. Rows of x are tokens (for gate
    and up) or pairs in that order (for down)."""
    rank = rank_block(site.max_rank)
    num_pairs, device = routing.pairs.shape[0], x.device
    out = torch.empty(num_pairs, site.num_parts * rank, dtype=x.dtype, device=device)
    is_wide = out.shape[1] * out.element_size() > WIDE_BYTES
    rows = min(SHRINK_ROWS, tiles.rows)
    per_tile = tiles.rows // rows
    _shrink[(tiles.places.shape[0] * per_tile,)](
        x, out, routing.pairs, tiles.places, tiles.count, slots, site.pool, site.table,
        site.scalings, x.shape[1], routing.weights.shape[1], per_tile,
        BY_PAIR=site.num_parts == 1, NUM_PARTS=site.num_parts, RANK=rank, BLOCK_M=rows,
        BLOCK_K=32 if is_wide else 64, num_warps=4, num_stages=3 if is_wide else 4,
        **launch_options(device),
    )  # fmt: skip
    return out


@triton.jit
def expand_part(
    shrunk, pool, table, slot, left, m, expert, n, n_size, first,
    PART: tl.constexpr, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both factors of h B^T for a slot's own rows of a tile, from rank `first` on: [rows, ranks]
    and [n, ranks]."""
    entry = table + (slot * NUM_PARTS + PART) * _PART_WIDTH
    rank = tl.load(entry + 2).to(tl.int32)
    b = pool + tl.multiple_of(tl.load(entry + 3) + expert * tl.load(entry + 4), 8)
    r = first + tl.arange(0, COLUMNS)
    is_rank = (r < rank)[None, :]
    weight = tl.load(
        b + n[:, None] * rank + r[None, :], mask=(n < n_size)[:, None] & is_rank, other=0.0
    )
    h_at = shrunk + (m[:, None].to(tl.int64) * NUM_PARTS + PART) * RANK + r[None, :]
    return tl.load(h_at, mask=(left == slot)[:, None] & is_rank, other=0.0), weight
