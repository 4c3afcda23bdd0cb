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
    known, rows, positions, newest, page_table, all_cos, all_sin, tokens, tables, cos, sin, width,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    token = tl.load(known + i)
    tl.store(tokens + i, tl.where(token == -1, tl.load(newest + row), token))
    d = tl.arange(0, HALF)
    position = tl.load(positions + i)
    tl.store(cos + i * HALF + d, tl.load(all_cos + position * HALF + d))
    tl.store(sin + i * HALF + d, tl.load(all_sin + position * HALF + d))
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pages = tl.load(page_table + row * width + at, mask=at < width, other=0)
        tl.store(tables + i * width + at, pages, mask=at < width)


def begin(
    known: Tensor,
    rows: Tensor,
    positions: Tensor,
    newest: Tensor,
    page_table: Tensor,
    turns: RopeTable,
) -> Gathered:
    """Of each of `rows`: its `known` token, or its newest one if that is PENDING; its pages; and
    of `turns`, which has every position, the one it is at."""
    num_rows, width, half = rows.shape[0], page_table.shape[1], turns.cos.shape[1]
    tokens = torch.empty_like(known)
    tables = torch.empty(num_rows, width, dtype=page_table.dtype, device=rows.device)
    cos, sin = torch.empty(2, num_rows, half, device=rows.device)
    _begin[(num_rows,)](
        known, rows, positions, newest, page_table, turns.cos, turns.sin, tokens, tables, cos, sin,
        width, HALF=half, BLOCK=BLOCK,
    )  # fmt: skip
    return Gathered(tokens, tables, RopeTable(cos, sin))


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
