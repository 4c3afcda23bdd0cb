"""silu(gate) * up with the adapters' expand in it.

Same signatures as `reference.py`. Elementwise, so programs are tiles of rows that want the same
adapter: its weights are read once per tile, and are the larger part of what is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.launch import as_splits, launch_options, wait_for_inputs
from manyroots.kernels.lora_sites.sites import LoraTerm
from manyroots.kernels.lora_sites.triton import RANK_BLOCK, expand_tile


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul(
    gate_up, out, hidden, pool, table, blocks, num_blocks, num_rows, n, in_split, in_row,
    hidden_split, hidden_row,
    NUM_SPLITS: tl.constexpr, HIDDEN_SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, RANK_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = cols < n
    if HIDDEN_SPLITS:
        count_blocks = tl.load(num_blocks)
    else:
        count_blocks = tl.cdiv(num_rows, BLOCK_R)
    for block in range(tl.program_id(1), count_blocks, tl.num_programs(1)):
        if HIDDEN_SPLITS:
            first = tl.load(blocks + 3 * block)
            count = tl.load(blocks + 3 * block + 1)
            slot = tl.load(blocks + 3 * block + 2)
        else:
            first = block * BLOCK_R
            count = tl.minimum(BLOCK_R, num_rows - first)
            slot = -1
        for at in range(0, count, BLOCK_R):
            r = at + tl.arange(0, BLOCK_R)
            rows = (first + r).to(tl.int64)
            ok = (r < count)[:, None] & col_ok[None, :]
            source = gate_up + rows[:, None] * in_row + cols[None, :]
            gate = tl.load(source, mask=ok, other=0.0).to(tl.float32)
            up = tl.load(source + n, mask=ok, other=0.0).to(tl.float32)
            for split in tl.static_range(1, NUM_SPLITS):
                gate += tl.load(source + split * in_split, mask=ok, other=0.0).to(tl.float32)
                up += tl.load(source + split * in_split + n, mask=ok, other=0.0).to(tl.float32)
            if HIDDEN_SPLITS:
                if slot >= 0:
                    inside = tl.minimum(cols, n - 1)
                    gate = expand_tile(
                        gate, hidden, hidden_split, hidden_row, pool, table, slot, 0, rows,
                        r < count, inside, 2, HIDDEN_SPLITS, RANK_BLOCK,
                    )  # fmt: skip
                    up = expand_tile(
                        up, hidden, hidden_split, hidden_row, pool, table, slot, 1, rows,
                        r < count, inside, 2, HIDDEN_SPLITS, RANK_BLOCK,
                    )  # fmt: skip
            tl.store(out + rows[:, None] * n + cols[None, :], gate * tl.sigmoid(gate) * up, mask=ok)


def silu_mul(gate_up: Tensor, dtype_like: Tensor, lora: LoraTerm | None = None) -> Tensor:
    """silu(gate) * up of [rows, 2 n] (or partial sums [splits, rows, 2 n]), in the dtype of
    `dtype_like`. `lora` is of a site with the parts gate and up."""
    parts = as_splits(gate_up)
    num_rows, n = parts.shape[1], parts.shape[2] // 2
    out = torch.empty(num_rows, n, dtype=dtype_like.dtype, device=parts.device)
    if lora is None:
        adapters = (parts, parts, parts, parts, parts)
        strides, splits = (0, 0), 0
        block_r, num_programs = (4, triton.cdiv(num_rows, 4))
    else:
        hidden, rows = lora.hidden, lora.rows
        adapters = (hidden, lora.site.pool, lora.site.table, rows.blocks, rows.num_blocks)
        strides, splits = (hidden.stride(0), hidden.stride(1)), hidden.shape[0]
        block_r, num_programs = (16, min(rows.max_blocks, 16) if num_rows <= 64 else rows.max_blocks)
    block_n = 128
    _silu_mul[(triton.cdiv(n, block_n), num_programs)](
        parts, out, *adapters, num_rows, n, parts.stride(0), parts.stride(1), *strides,
        NUM_SPLITS=parts.shape[0], HIDDEN_SPLITS=splits, BLOCK_R=block_r, BLOCK_N=block_n,
        RANK_BLOCK=RANK_BLOCK, num_warps=4, num_stages=1, **launch_options(parts.device),
    )  # fmt: skip
    return out
