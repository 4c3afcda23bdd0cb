"""The beginning and the end of a decode step, one launch each.

Same signatures as `reference.py`. Launched plainly: what `begin` writes is a constant to the
kernels that follow, and what `end` reads is all that came before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyroots.kernels.decode_rows.reference import Gathered
from manyroots.kernels.rope_write.inputs import RopeTable

BLOCK = 256


@triton.jit
def _begin(
    known, rows, newest, page_tables, tokens, tables, num_rows, max_rows, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    family = tl.program_id(1)
    row = tl.load(rows + i)
    if family == 0:
        token = tl.load(known + i)
        tl.store(tokens + i, tl.where(token == -1, tl.load(newest + row), token))
    table = page_tables + (family * max_rows + row) * width
    gathered = tables + (family * num_rows + i) * width
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pages = tl.load(table + at, mask=at < width, other=0)
        tl.store(gathered + at, pages, mask=at < width)


@triton.jit
def _rope_rows(
    positions, all_cos, all_sin, cos, sin, half, PADDED_HALF: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + i)
    d = tl.arange(0, PADDED_HALF)
    ok = d < half
    tl.store(cos + i * half + d, tl.load(all_cos + position * half + d, mask=ok), mask=ok)
    tl.store(sin + i * half + d, tl.load(all_sin + position * half + d, mask=ok), mask=ok)


def begin(
    known: Tensor,
    rows: Tensor,
    positions: Tensor,
    newest: Tensor,
    page_tables: Tensor,
    ropes: tuple[RopeTable, ...],
) -> Gathered:
    """Of each of `rows`: its `known` token, or its newest one if that is PENDING; its pages in
    every family; and of `ropes`, which have every position, the one it is at."""
    num_rows = rows.shape[0]
    families, max_rows, width = page_tables.shape
    tokens = torch.empty_like(known)
    tables = page_tables.new_empty(families, num_rows, width)
    _begin[(num_rows, families)](
        known, rows, newest, page_tables, tokens, tables, num_rows, max_rows, width, BLOCK=BLOCK
    )
    return Gathered(tokens, tables, tuple(_rows_of(rope, positions) for rope in ropes))


def _rows_of(rope: RopeTable, positions: Tensor) -> RopeTable:
    num_rows, half = positions.shape[0], rope.cos.shape[1]
    cos, sin = rope.cos.new_empty(2, num_rows, half)
    _rope_rows[(num_rows,)](
        positions, rope.cos, rope.sin, cos, sin, half, PADDED_HALF=triton.next_power_of_2(half)
    )
    return RopeTable(cos, sin)


@triton.jit
def _end(tokens, finite, rows, newest, result, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_rows
    token = tl.load(tokens + i, mask=ok, other=0)
    tl.store(newest + tl.load(rows + i, mask=ok, other=0), token.to(tl.int64), mask=ok)
    tl.store(result + i, token, mask=ok)
    tl.store(result + num_rows + i, tl.load(finite + i, mask=ok, other=0).to(tl.int32), mask=ok)


def end(tokens: Tensor, finite: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Keep int32 `tokens` as the newest of `rows`, of which one that nobody reads may occur many
    times. Gives int32 [2, num_rows]: the tokens, and whether their logits were finite."""
    num_rows = tokens.shape[0]
    result = torch.empty(2, num_rows, dtype=torch.int32, device=tokens.device)
    _end[(triton.cdiv(num_rows, BLOCK),)](
        tokens, finite, rows, newest, result, num_rows, BLOCK=BLOCK
    )
    return result
