"""The absorbed products of latent attention in Triton: a head's rows times its part of `kv_b_proj`.

Same signatures as `reference.py`. A program has a tile of one head's weights, which it requests
before the rows are ready. The adapters' part is in factored form, by further programs of the same
launch: each has one token and head, for which two small products suffice. Then it waits for the
head's tiles, whose products are in float32, adds them and rounds once. It waits only for earlier
programs, which wait for none.
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

LEAST = 16
"""Smallest size of each dimension of a matrix instruction."""
PROGRAMS = 128
"""Fewest programs, if a head's tiles can be made small enough."""
ONE_TILE = 16384
"""Of few rows, a program's weights up to this many are one tile: all are requested early."""
RANKS = 16
"""Ranks that a program expands at once."""


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
def _of_ranks(
    a_all, b_all, first, rank, n, d,
    ROWS: tl.constexpr, LATENT: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A [RANKS, latent] and B [rows, RANKS] of the ranks from `first` on; zero past the rank."""
    r = first + tl.arange(0, RANKS)
    is_a = (r < rank)[:, None] & (d < LATENT)[None, :]
    a = tl.load(a_all + r[:, None] * LATENT + d[None, :], mask=is_a, other=0.0)
    is_b = (n < ROWS)[:, None] & (r < rank)[None, :]
    b = tl.load(b_all + n[:, None] * rank + r[None, :], mask=is_b, other=0.0)
    return a, b


@triton.jit
def _add_absorbed(
    q, base, out, pool, table, scalings, slots, done, count, token, head, q_row, q_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr,
    ROPE: tl.constexpr, NOPE_POW: tl.constexpr, LATENT_POW: tl.constexpr, ROPE_POW: tl.constexpr,
    RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply a token's query of one head with its rows of B, then with A; add `base` when `count`
    tiles of it are done, and round. The rest of the query is copied."""
    slot = tl.load(slots + token)
    rank = tl.load(table + slot * 5 + 1, mask=slot >= 0, other=0)
    slot = tl.maximum(slot, 0)
    a_all = pool + tl.load(table + slot * 5)
    b_all = pool + tl.load(table + slot * 5 + 4) + head * SIZE * rank
    scaling = tl.load(scalings + slot)
    n, d = tl.arange(0, NOPE_POW), tl.arange(0, LATENT_POW)
    # Adapters are constant in a step, so the first ranks are requested before the rows are ready.
    a, b = _of_ranks(a_all, b_all, 0, rank, n, d, NOPE, LATENT, RANKS)
    wait_for_inputs(DEPENDENT)
    query = tl.load(q + token * q_row + head * q_head + n, mask=n < NOPE, other=0.0).to(tl.float32)
    shrunk = tl.sum(query[:, None] * b.to(tl.float32), axis=0) * scaling
    added = tl.sum(shrunk[:, None] * a.to(tl.float32), axis=0)
    for first in range(RANKS, rank, RANKS):
        a, b = _of_ranks(a_all, b_all, first, rank, n, d, NOPE, LATENT, RANKS)
        shrunk = tl.sum(query[:, None] * b.to(tl.float32), axis=0) * scaling
        added += tl.sum(shrunk[:, None] * a.to(tl.float32), axis=0)
    row = token * HEADS + head
    wait_for_count(done + head, count)
    added += tl.load(base + row * LATENT + d, mask=d < LATENT, other=0.0, cache_modifier=".cg")
    tl.store(out + row * (LATENT + ROPE) + d, added, mask=d < LATENT)
    if ROPE:
        e = tl.arange(0, ROPE_POW)
        rest = tl.load(q + token * q_row + head * q_head + NOPE + e, mask=e < ROPE, other=0.0)
        tl.store(out + row * (LATENT + ROPE) + LATENT + e, rest, mask=e < ROPE)


@triton.jit
def _add_expanded(
    attended, base, out, pool, table, scalings, slots, done, count, token, head, x_row, x_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, SIZE: tl.constexpr, LATENT: tl.constexpr,
    VALUE_POW: tl.constexpr, LATENT_POW: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply a token's attended latents of one head with A, then with its rows of B; add `base`
    when `count` tiles of it are done, and round."""
    slot = tl.load(slots + token)
    rank = tl.load(table + slot * 5 + 1, mask=slot >= 0, other=0)
    slot = tl.maximum(slot, 0)
    a_all = pool + tl.load(table + slot * 5)
    b_all = pool + tl.load(table + slot * 5 + 4) + (head * SIZE + NOPE) * rank
    scaling = tl.load(scalings + slot)
    n, d = tl.arange(0, VALUE_POW), tl.arange(0, LATENT_POW)
    a, b = _of_ranks(a_all, b_all, 0, rank, n, d, SIZE - NOPE, LATENT, RANKS)
    wait_for_inputs(DEPENDENT)
    x = tl.load(attended + token * x_row + head * x_head + d, mask=d < LATENT, other=0.0)
    x = x.to(tl.float32)
    is_value = n < SIZE - NOPE
    shrunk = tl.sum(a.to(tl.float32) * x[None, :], axis=1) * scaling
    added = tl.sum(b.to(tl.float32) * shrunk[None, :], axis=1)
    for first in range(RANKS, rank, RANKS):
        a, b = _of_ranks(a_all, b_all, first, rank, n, d, SIZE - NOPE, LATENT, RANKS)
        shrunk = tl.sum(a.to(tl.float32) * x[None, :], axis=1) * scaling
        added += tl.sum(b.to(tl.float32) * shrunk[None, :], axis=1)
    at = (token * HEADS + head) * (SIZE - NOPE) + n
    wait_for_count(done + head, count)
    added += tl.load(base + at, mask=is_value, other=0.0, cache_modifier=".cg")
    tl.store(out + at, added, mask=is_value)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _by_head_with_adapters(
    x, weight, base, out, pool, table, scalings, slots, done, num_rows, num_blocks, x_row, x_head,
    w_head, w_k, w_n, base_row, base_head,
    HEADS: tl.constexpr, NUM_TILES: tl.constexpr, K_SIZE: tl.constexpr, N_SIZE: tl.constexpr,
    K_POW: tl.constexpr, N_POW: tl.constexpr, NOPE: tl.constexpr, SIZE: tl.constexpr,
    ROPE: tl.constexpr, ROPE_POW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, RANKS: tl.constexpr, IS_QUERY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The products of all heads in `base`, and by further programs what adapters add to them.
    `done` counts each head's programs and is zero again at the end."""
    let_next_begin(DEPENDENT)
    program = tl.program_id(0)
    count = NUM_TILES * num_blocks
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
    token = (program // HEADS).to(tl.int64)
    if IS_QUERY:
        _add_absorbed(
            x, base, out, pool, table, scalings, slots, done, count, token, head, x_row, x_head,
            HEADS, NOPE, SIZE, N_SIZE, ROPE, K_POW, N_POW, ROPE_POW, RANKS, DEPENDENT,
        )  # fmt: skip
    else:
        _add_expanded(
            x, base, out, pool, table, scalings, slots, done, count, token, head, x_row, x_head,
            HEADS, NOPE, SIZE, K_SIZE, N_POW, K_POW, RANKS, DEPENDENT,
        )  # fmt: skip
    if tl.atomic_add(done + head, 1, sem="relaxed") == count + num_rows - 1:
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
    attended: Tensor, weight: Tensor, nope: int, adapters: LatentAdapters | None
) -> Tensor:
    """Values [tokens, heads, v] of attended latents [tokens, heads, latent]."""
    num_tokens, heads, latent = attended.shape
    value = weight.shape[1] - nope
    out = torch.empty(num_tokens, heads, value, dtype=attended.dtype, device=attended.device)
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
    site = adapters.site
    base = torch.empty(num_rows, heads, n_size, dtype=torch.float32, device=x.device)
    _by_head_with_adapters[(heads * (num_tiles * num_blocks + num_rows),)](
        x, own, base, out, site.pool, site.table, site.scalings, adapters.rows.slots,
        counters(x.device), num_rows, num_blocks, *x.stride()[:2], w_head, *steps,
        *base.stride()[:2], HEADS=heads, NUM_TILES=num_tiles, K_POW=padded(k_size),
        N_POW=padded(n_size), NOPE=nope, SIZE=weight.shape[1], ROPE=rope, ROPE_POW=padded(rope),
        RANKS=RANKS, IS_QUERY=is_query, **constants,
    )  # fmt: skip
