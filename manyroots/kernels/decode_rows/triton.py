"""The beginning and the end of a decode step: a launch each, and one more for every further kind
of rotation.

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
def _rope_row(i, positions, all_cos, all_sin, cos, sin, half, PADDED_HALF: tl.constexpr):
    position = tl.load(positions + i)
    d = tl.arange(0, PADDED_HALF)
    ok = d < half
    tl.store(cos + i * half + d, tl.load(all_cos + position * half + d, mask=ok), mask=ok)
    tl.store(sin + i * half + d, tl.load(all_sin + position * half + d, mask=ok), mask=ok)


@triton.jit
def _rope_rows(positions, all_cos, all_sin, cos, sin, half, PADDED_HALF: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    _rope_row(i, positions, all_cos, all_sin, cos, sin, half, PADDED_HALF)


@triton.jit
def _begin(
    known, rows, newest, page_tables, tokens, tables, num_rows, max_rows, width, positions,
    all_cos, all_sin, cos, sin, half, PADDED_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    family = tl.program_id(1)
    row = tl.load(rows + i)
    if family == 0:
        token = tl.load(known + i)
        tl.store(tokens + i, tl.where(token == -1, tl.load(newest + row), token))
        _rope_row(i, positions, all_cos, all_sin, cos, sin, half, PADDED_HALF)
    table = page_tables + (family * max_rows + row) * width
    gathered = tables + (family * num_rows + i) * width
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pages = tl.load(table + at, mask=at < width, other=0)
        tl.store(gathered + at, pages, mask=at < width)


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
    turned = [RopeTable(*rope.cos.new_empty(2, num_rows, rope.cos.shape[1])) for rope in ropes]
    lookups = [
        (positions, rope.cos, rope.sin, to.cos, to.sin, rope.cos.shape[1])
        for rope, to in zip(ropes, turned, strict=True)
    ]
    _begin[(num_rows, families)](
        known, rows, newest, page_tables, tokens, tables, num_rows, max_rows, width, *lookups[0],
        PADDED_HALF=_padded_half(ropes[0]), BLOCK=BLOCK,
    )  # fmt: skip
    for rope, lookup in zip(ropes[1:], lookups[1:], strict=True):
        _rope_rows[(num_rows,)](*lookup, PADDED_HALF=_padded_half(rope))
    return Gathered(tokens, tables, tuple(turned))


def _padded_half(rope: RopeTable) -> int:
    padded: int = triton.next_power_of_2(rope.cos.shape[1])
    return padded


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
