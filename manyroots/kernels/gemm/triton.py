"""A few rows times a large weight: a kernel that reads the weight as fast as memory gives it.

Same signatures as `reference.py`. The weight is the matrix instruction's left operand, so that 16
rows cost no more than one. The inner dimension may be cut into splits, which give partial sums to
the next kernel. The adapters' A are further tiles of the same launch: their bytes cost what bytes
cost, their arithmetic nothing. While the kernel before this one still runs, the first tiles of the
weight are already on their way into the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import (
    launch_options,
    let_next_begin,
    prefetch,
    wait_for_inputs,
)
from manyroots.kernels.lora_sites.sites import LoraRows, LoraSite, LoraTerm
from manyroots.kernels.lora_sites.triton import scale_of

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one shape is cut up; found by measurement."""

    block_n: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int
    prefetch: int = 0
    """128-byte lines of each weight row to ask for before the inputs are there."""


@triton.jit
def _product(
    x, w_rows, row_ok, num_rows, k_size, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """W x^T over [first, last) of the inner dimension: [BLOCK_N, BLOCK_M] in float32."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.minimum(m, num_rows - 1)[:, None] * k_size + k[None, :]
    w_at = w_rows[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(first, last, BLOCK_K):
        if MASKED:
            weight = tl.load(w_at + at, mask=row_ok[:, None], other=0.0)
        else:
            weight = tl.load(w_at + at, eviction_policy="evict_first")
        xs = tl.load(x_at + at)
        acc = tl.dot(weight, tl.trans(xs), acc, input_precision="ieee")
    return acc


@triton.jit
def _shrink_tile(
    x, hidden, pool, table, scalings, blocks, num_blocks, pid, split, first, last, num_rows,
    k_size, hidden_row,
    lora_tiles,
    NUM_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """An adapter's A as a further tile of weights: it gives its own rows' shrunk activations."""
    block = pid // lora_tiles
    if block < tl.load(num_blocks):
        begin = tl.load(blocks + 3 * block)
        count = tl.load(blocks + 3 * block + 1)
        slot = tl.load(blocks + 3 * block + 2)
        entry = table + tl.maximum(slot, 0) * (2 + 3 * NUM_PARTS)
        total = tl.where(slot >= 0, tl.load(entry + 1).to(tl.int32), 0)
        first_n = (pid % lora_tiles) * BLOCK_N
        if first_n < total:
            n = first_n + tl.arange(0, BLOCK_N)
            a = pool + tl.multiple_of(tl.load(entry), 8)
            w_rows = a + tl.minimum(n, total - 1).to(tl.int64) * k_size
            if PREFETCH:
                line = tl.arange(0, PREFETCH) * 64
                prefetch(w_rows[:, None] + first + line[None, :], DEPENDENT)
            scale = scale_of(scalings, table, slot, n, NUM_PARTS)
            wait_for_inputs(DEPENDENT)
            acc = _product(
                x, w_rows, n < total, num_rows, k_size, first, last, BLOCK_M, BLOCK_N, BLOCK_K, True
            )
            acc *= scale[:, None]
            m = tl.arange(0, BLOCK_M)
            mine = (m >= begin) & (m < begin + count)
            to = hidden + (split * num_rows + m[:, None]) * hidden_row + n[None, :]
            tl.store(to, tl.trans(acc), mask=mine[:, None] & (n < total)[None, :])


@triton.jit(do_not_specialize=["num_rows", "lora_blocks", "lora_tiles"])
def _linear(
    x, w, out, hidden, pool, table, scalings, blocks, num_blocks, num_rows, n_size, k_size,
    hidden_row, lora_blocks, lora_tiles,
    NUM_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    num_shrinking = lora_blocks * lora_tiles
    pid = tl.program_id(0)
    split = tl.program_id(1)
    steps = tl.cdiv(k_size // BLOCK_K, tl.num_programs(1))
    first = split * steps * BLOCK_K
    last = tl.minimum(k_size, first + steps * BLOCK_K)
    if NUM_PARTS:
        if pid < num_shrinking:
            _shrink_tile(
                x, hidden, pool, table, scalings, blocks, num_blocks, pid, split, first, last,
                num_rows, k_size, hidden_row, lora_tiles, NUM_PARTS, BLOCK_M, BLOCK_N, BLOCK_K,
                PREFETCH, DEPENDENT,
            )  # fmt: skip
            return
    n = (pid - num_shrinking) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w + tl.minimum(n, n_size - 1).to(tl.int64) * k_size
    if PREFETCH:
        line = tl.arange(0, PREFETCH) * 64
        prefetch(w_rows[:, None] + first + line[None, :], DEPENDENT)
    wait_for_inputs(DEPENDENT)
    m = tl.arange(0, BLOCK_M)
    acc = _product(
        x, w_rows, n < n_size, num_rows, k_size, first, last, BLOCK_M, BLOCK_N, BLOCK_K, False
    )
    to = out + (split * num_rows + m[:, None]).to(tl.int64) * n_size + n[None, :]
    tl.store(to, tl.trans(acc), mask=(m < num_rows)[:, None] & (n < n_size)[None, :])


def linear(
    x: Tensor,
    weight: Tensor,
    site: LoraSite | None = None,
    rows: LoraRows | None = None,
    *,
    tiling: Tiling | None = None,
) -> tuple[Tensor, LoraTerm | None]:
    """x [rows, k] times weight [n, k] transposed, as partial sums [splits, rows, n] in float32 or
    one product in x's dtype; and, given a site, what its adapters shrink x to."""
    num_rows, k_size = x.shape
    n_size = weight.shape[0]
    tiling = tiling or tiling_for(num_rows, n_size, k_size)
    splits = tiling.num_splits
    out = torch.empty(
        splits, num_rows, n_size, dtype=x.dtype if splits == 1 else torch.float32, device=x.device
    )
    if site is None or rows is None:
        term, lora_blocks, lora_tiles = None, 0, 1
        adapters = (out, x, x, x, x, x)
        width, num_parts = 0, 0
    else:
        width, num_parts = site.width, site.num_parts
        hidden = torch.empty(splits, num_rows, width, dtype=torch.float32, device=x.device)
        term = LoraTerm(hidden, site, rows)
        lora_blocks, lora_tiles = rows.max_blocks, triton.cdiv(width, tiling.block_n)
        adapters = (hidden, site.pool, site.table, site.scalings, rows.blocks, rows.num_blocks)
    grid = (lora_blocks * lora_tiles + triton.cdiv(n_size, tiling.block_n), splits)
    _linear[grid](
        x, weight, out, *adapters, num_rows, n_size, k_size, width, lora_blocks, lora_tiles,
        NUM_PARTS=num_parts,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)), BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k, PREFETCH=tiling.prefetch, num_stages=tiling.num_stages,
        num_warps=tiling.num_warps, **launch_options(x.device),
    )  # fmt: skip
    return out, term


def tiling_for(num_rows: int, n_size: int, k_size: int) -> Tiling:
    """The measured choice for H200-like memory; see the module's history for the sweep."""
    tiles = triton.cdiv(n_size, 128)
    splits = 1
    while tiles * splits < 120 and splits < 8 and k_size % (splits * 2 * 128) == 0:
        splits *= 2
    return Tiling(128, 128, splits, 4, 4)
