"""The start and the end of a step, one launch each.

Same signatures as `reference.py`. Both are plain launches: all later kernels read what `begin`
writes, and `end` reads what all earlier kernels wrote.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _begin(
    known, token_rows, newest, page_tables, rows, tokens, tables, num_tokens, num_rows, max_rows,
    width, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    family = tl.program_id(1).to(tl.int64)
    if (family == 0) & (i < num_tokens):
        token = tl.load(known + i)
        row_of_token = tl.load(token_rows + i)
        tl.store(tokens + i, tl.where(token == -1, tl.load(newest + row_of_token), token))
    if i < num_rows:
        table = page_tables + (family * max_rows + tl.load(rows + i)) * width
        gathered = tables + (family * num_rows + i) * width
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            pages = tl.load(table + at, mask=at < width, other=0)
            tl.store(gathered + at, pages, mask=at < width)


def begin(
    known: Tensor, token_rows: Tensor, newest: Tensor, page_tables: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the step's tokens, int64: the `known` ones, or the newest token of the row for
    PENDING. Also returns the entries of page_tables [families, all rows, max_pages] for `rows`,
    int32 [families, num_rows, max_pages]."""
    num_tokens, num_rows = known.shape[0], rows.shape[0]
    families, max_rows, width = page_tables.shape
    tokens = torch.empty_like(known)
    tables = page_tables.new_empty(families, num_rows, width)
    _begin[(max(num_tokens, num_rows), families)](
        known, token_rows, newest, page_tables, rows, tokens, tables, num_tokens, num_rows,
        max_rows, width, BLOCK=BLOCK,
    )  # fmt: skip
    return tokens, tables


@triton.jit
def _end(tokens, rows, newest, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_rows
    token = tl.load(tokens + i, mask=ok, other=0)
    tl.store(newest + tl.load(rows + i, mask=ok, other=0), token.to(tl.int64), mask=ok)


def end(tokens: Tensor, rows: Tensor, newest: Tensor) -> None:
    """Store int32 `tokens` as the newest of `rows`. An unused row may occur many times."""
    num_rows = tokens.shape[0]
    _end[(triton.cdiv(num_rows, BLOCK),)](tokens, rows, newest, num_rows, BLOCK=BLOCK)
