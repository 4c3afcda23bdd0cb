"""The absorbed products of latent attention in Triton: a head's rows times its part of `kv_b_proj`.

Same signatures as `reference.py`. A program has a tile of one head's weights, which it requests
before the rows are ready. The adapters' part is in factored form, by further programs of the same
launch: each has a row, or rows of one adapter, and a head, for which two small products suffice.
Then it waits for the head's tiles, whose products are in float32, adds them and rounds once. It
waits only for earlier programs, which wait for none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.latent.inputs import LatentAdapters
from manyroots.kernels.latent.triton_rows import padded
from manyroots.kernels.launch import (
    counters,
    launch_options,
    let_next_begin,
    wait_for_count,
    wait_for_inputs,
)
from manyroots.kernels.lora_ops.triton import block_at

LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""
PROGRAMS = 128
"""Fewest programs, if a head's tiles can be made small enough."""
ONE_TILE = 16384
"""Of few rows, a program's weights up to this many are one tile: all are requested early."""
RANKS = 16
"""Ranks that a program expands at once."""
MOST_SINGLE_ROWS = 16
"""Up to this many rows, a program of the adapters has one row, which takes no matrix instructions:
with few rows, blocks of several are rare."""


@triton.jit
def _tile(
    x, weight, out, number, head, block, num_rows, x_row, x_head, w_head, w_k, w_n, out_row,
    out_head, K_SIZE: tl.constexpr, N_SIZE: tl.constexpr, REST: tl.constexpr,
    REST_POW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute tile `number` of one head's product. The first tile also copies the REST numbers
    after the rows' first K_SIZE."""
    n = number * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (m < num_rows)[:, None]
    weight_at = weight + head * w_head + k[:, None] * w_k + n[None, :] * w_n
    is_column = (n < N_SIZE)[None, :]
    # Weights are constant in a step, so the first tile is requested before the rows are ready.
    tile = tl.load(weight_at, mask=(k < K_SIZE)[:, None] & is_column, other=0.0)
    wait_for_inputs(DEPENDENT)
    row_at = x + m.to(tl.int64)[:, None] * x_row + head * x_head
    rows = tl.load(row_at + k[None, :], mask=is_row & (k < K_SIZE)[None, :], other=0.0)
    acc = tl.dot(rows, tile, input_precision="ieee")
    for first in range(BLOCK_K, K_SIZE, BLOCK_K):
        is_inner = first + k < K_SIZE
        tile = tl.load(weight_at + first * w_k, mask=is_inner[:, None] & is_column, other=0.0)
        rows = tl.load(row_at + first + k[None, :], mask=is_row & is_inner[None, :], other=0.0)
        acc = tl.dot(rows, tile, acc, input_precision="ieee")
    to = out + m.to(tl.int64)[:, None] * out_row + head * out_head
    tl.store(to + n[None, :], acc, mask=is_row & is_column)
    if REST:
        if number == 0:
            d = tl.arange(0, REST_POW)
            is_rest = is_row & (d < REST)[None, :]
            rest = tl.load(row_at + K_SIZE + d[None, :], mask=is_rest, other=0.0)
            tl.store(to + N_SIZE + d[None, :], rest, mask=is_rest)


@triton.jit(do_not_specialize=["num_rows"])
def _by_head(
    x, weight, out, num_rows, x_row, x_head, w_head, w_k, w_n, out_row, out_head,
    K_SIZE: tl.constexpr, N_SIZE: tl.constexpr, REST: tl.constexpr, REST_POW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The products of all heads."""
    let_next_begin(DEPENDENT)
    _tile(
        x, weight, out, tl.program_id(0), tl.program_id(1), tl.program_id(2), num_rows, x_row,
        x_head, w_head, w_k, w_n, out_row, out_head, K_SIZE, N_SIZE, REST, REST_POW, BLOCK_M,
        BLOCK_N, BLOCK_K, DEPENDENT,
    )  # fmt: skip


@triton.jit
def _times(x, y):
    """x y in float32: of one row with ordinary instructions, of several with matrix instructions.
    These take numbers of half precision, so float32 x is two of them, which keep 16 bits."""
    if x.shape[0] == 1:
        return tl.sum(tl.trans(x).to(tl.float32) * y.to(tl.float32), axis=0)[None, :]
    high = x.to(y.dtype)
    acc = tl.dot(high, y, input_precision="ieee")
    if x.dtype != y.dtype:
        acc = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_low_rank(
    x, base, out, pool, table, scalings, slot, done, count, head, start, end, x_row, x_head,
    HEADS: tl.constexpr, K_SIZE: tl.constexpr, N_SIZE: tl.constexpr, K_POW: tl.constexpr,
    N_POW: tl.constexpr, NOPE: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, ROPE_POW: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    IS_QUERY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply rows [start, end) of a slot and head with its two small matrices; add `base` when
    `count` tiles of it are done, and round. The rest of the rows is copied."""
    rank = tl.multiple_of(tl.load(table + slot * 5 + 1, mask=slot >= 0, other=0).to(tl.int32), 8)
    slot = tl.maximum(slot, 0)
    a_all = pool + tl.multiple_of(tl.load(table + slot * 5), 8)
    b_all = pool + tl.multiple_of(tl.load(table + slot * 5 + 4), 8)
    b_all += (head * SIZE + (0 if IS_QUERY else NOPE)) * rank
    scaling = tl.load(scalings + slot)
    row = start + tl.arange(0, ROWS)
    k, n, r = tl.arange(0, K_POW), tl.arange(0, N_POW), tl.arange(0, RANKS)
    is_row = (row < end)[:, None]
    row = row.to(tl.int64)
    from_row = x + row[:, None] * x_row + head * x_head
    if IS_QUERY:  # B of the keys' part, then A
        first_at, first_k, first_r, then_at, then_r, then_n = b_all, rank, 1, a_all, LATENT, 1
    else:  # A, then B of the values' part
        first_at, first_k, first_r, then_at, then_r, then_n = a_all, 1, LATENT, b_all, 1, rank
    first_at += k[:, None] * first_k + r[None, :] * first_r
    then_at += r[:, None] * then_r + n[None, :] * then_n
    is_k, is_n = (k < K_SIZE)[:, None], (n < N_SIZE)[None, :]
    # Adapters are constant in a step, so the first ranks are requested before the rows are ready.
    first = tl.load(first_at, mask=is_k & (r < rank)[None, :], other=0.0)
    then = tl.load(then_at, mask=is_n & (r < rank)[:, None], other=0.0)
    wait_for_inputs(DEPENDENT)
    rows = tl.load(from_row + k[None, :], mask=is_row & (k < K_SIZE)[None, :], other=0.0)
    added = _times(_times(rows, first) * scaling, then)
    for rank_at in range(RANKS, rank, RANKS):
        is_rank = rank_at + r < rank
        first = tl.load(first_at + rank_at * first_r, mask=is_k & is_rank[None, :], other=0.0)
        then = tl.load(then_at + rank_at * then_r, mask=is_n & is_rank[:, None], other=0.0)
        added += _times(_times(rows, first) * scaling, then)
    row_head = (row * HEADS + head)[:, None]
    is_out = is_row & is_n
    wait_for_count(done + head, count)
    added += tl.load(
        base + row_head * N_SIZE + n[None, :], mask=is_out, other=0.0, cache_modifier=".cg"
    )
    tl.store(out + row_head * (N_SIZE + ROPE) + n[None, :], added, mask=is_out)
    if ROPE:
        e = tl.arange(0, ROPE_POW)[None, :]
        is_rest = is_row & (e < ROPE)
        rest = tl.load(from_row + K_SIZE + e, mask=is_rest, other=0.0)
        tl.store(out + row_head * (N_SIZE + ROPE) + N_SIZE + e, rest, mask=is_rest)


@triton.jit(do_not_specialize=["num_rows", "num_tile_rows", "num_programs"])
def _by_head_with_adapters(
    x, weight, base, out, pool, table, scalings, slots, blocks, num_blocks, done, num_rows,
    num_tile_rows, num_programs, x_row, x_head, w_head, w_k, w_n, base_row, base_head,
    HEADS: tl.constexpr, NUM_TILES: tl.constexpr, K_SIZE: tl.constexpr, N_SIZE: tl.constexpr,
    K_POW: tl.constexpr, N_POW: tl.constexpr, NOPE: tl.constexpr, SIZE: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_POW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
    IS_QUERY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The products of all heads in `base`, and by further programs what adapters add to them: each
    takes a row, or blocks of rows of one adapter, for one head. `done` counts each head's programs
    and is zero again at the end."""
    let_next_begin(DEPENDENT)
    program = tl.program_id(0)
    count = NUM_TILES * num_tile_rows
    if program < HEADS * count:
        head = program // NUM_TILES % HEADS
        _tile(
            x, weight, base, program % NUM_TILES, head, program // NUM_TILES // HEADS, num_rows,
            x_row, x_head, w_head, w_k, w_n, base_row, base_head, K_SIZE, N_SIZE, 0, 1, BLOCK_M,
            BLOCK_N, BLOCK_K, DEPENDENT,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(done + head, 1, sem="release")
        return
    program -= HEADS * count
    head = program % HEADS
    program = program // HEADS
    num_used = num_programs
    if ROWS > 1:
        # A graph has programs for more blocks than a step may have. These must not be counted:
        # they wait for no tile, and others would take them for tiles.
        num_used = tl.minimum(num_programs, tl.load(num_blocks))
        if program >= num_used:
            return
    if ROWS == 1:
        _add_low_rank(
            x, base, out, pool, table, scalings, tl.load(slots + program), done, count, head,
            program, program + 1, x_row, x_head, HEADS, K_SIZE, N_SIZE, K_POW, N_POW, NOPE, SIZE,
            LATENT, ROPE, ROPE_POW, ROWS, RANKS, IS_QUERY, DEPENDENT,
        )  # fmt: skip
    else:
        for block in range(program, tl.load(num_blocks), num_programs):
            start, num_own, slot = block_at(blocks, block)
            for first in range(start, start + num_own, ROWS):
                _add_low_rank(
                    x, base, out, pool, table, scalings, slot, done, count, head, first,
                    start + num_own, x_row, x_head, HEADS, K_SIZE, N_SIZE, K_POW, N_POW, NOPE,
                    SIZE, LATENT, ROPE, ROPE_POW, ROWS, RANKS, IS_QUERY, DEPENDENT,
                )  # fmt: skip
    if tl.atomic_add(done + head, 1, sem="relaxed") == count + num_used - 1:
        tl.store(done + head, 0)


def absorb_queries(q: Tensor, weight: Tensor, nope: int, adapters: LatentAdapters | None) -> Tensor:
    """Queries of latents, [tokens, heads, latent + rope], from q [tokens, heads, nope + rope] and
    `kv_b_proj` as weight [heads, nope + v, latent]."""
    num_tokens, heads, size = q.shape
    latent = weight.shape[2]
    rope = size - nope
    out = torch.empty(num_tokens, heads, latent + rope, dtype=q.dtype, device=q.device)
    _multiply(q, weight, out, (nope, latent), rope, nope, adapters, is_query=True)
    return out


def expand_values(
    attended: Tensor,
    weight: Tensor,
    nope: int,
    adapters: LatentAdapters | None,
    out: Tensor | None = None,
) -> Tensor:
    """Values [tokens, heads, v] of attended latents [tokens, heads, latent], in `out` if given."""
    num_tokens, heads, latent = attended.shape
    value = weight.shape[1] - nope
    if out is None:
        out = attended.new_empty(num_tokens, heads, value)
    assert out.is_contiguous()
    _multiply(attended, weight, out, (latent, value), 0, nope, adapters, is_query=False)
    return out


def _multiply(
    x: Tensor, weight: Tensor, out: Tensor, sizes: tuple[int, int], rope: int, nope: int,
    adapters: LatentAdapters | None, *, is_query: bool,
) -> None:  # fmt: skip
    num_rows, heads, _ = x.shape
    k_size, n_size = sizes
    w_head, w_row, w_column = weight.stride()
    own, steps = (weight, (w_row, w_column)) if is_query else (weight[:, nope:], (w_column, w_row))
    block_n = padded(min(128, n_size), LEAST)
    while block_n > LEAST and heads * -(-n_size // block_n) < PROGRAMS:
        block_n //= 2
    # The adapters' programs have as much shared memory as a tile, and should be many at once.
    block_m = padded(min(64 if adapters is None else 32, num_rows), LEAST)
    most_k = 128 if x.element_size() == 2 else 32
    if block_m == LEAST and x.element_size() == 2 and padded(k_size) * block_n <= ONE_TILE:
        most_k = k_size
    num_tiles, num_blocks = -(-n_size // block_n), -(-num_rows // block_m)
    constants = {
        "K_SIZE": k_size, "N_SIZE": n_size, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_K": padded(min(most_k, k_size), LEAST), "num_warps": 4, "num_stages": 3,
        **launch_options(x.device),
    }  # fmt: skip
    if adapters is None:
        _by_head[(num_tiles, heads, num_blocks)](
            x, own, out, num_rows, *x.stride()[:2], w_head, *steps, *out.stride()[:2], REST=rope,
            REST_POW=padded(rope), **constants,
        )  # fmt: skip
        return
    site, lora = adapters.site, adapters.rows
    rows_each, num_programs = LEAST, lora.num_programs
    if num_rows <= MOST_SINGLE_ROWS:
        rows_each, num_programs = 1, num_rows
    base = torch.empty(num_rows, heads, n_size, dtype=torch.float32, device=x.device)
    _by_head_with_adapters[(heads * (num_tiles * num_blocks + num_programs),)](
        x, own, base, out, site.pool, site.table, site.scalings, lora.slots, lora.blocks,
        lora.num_blocks, counters(x.device), num_rows, num_blocks, num_programs,
        *x.stride()[:2], w_head, *steps, *base.stride()[:2], HEADS=heads, NUM_TILES=num_tiles,
        K_POW=padded(k_size, LEAST), N_POW=padded(n_size, LEAST), NOPE=nope, SIZE=weight.shape[1],
        LATENT=weight.shape[2], ROPE=rope, ROPE_POW=padded(rope), ROWS=rows_each, RANKS=RANKS,
        IS_QUERY=is_query, **constants,
    )  # fmt: skip
