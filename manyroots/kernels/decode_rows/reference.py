"""Start and end of a step: gather the rows' state, and store their newest tokens. Reference."""

from __future__ import annotations

import torch
from torch import Tensor

PENDING = -1
"""Stands for a token that only the device knows."""


def begin(
    known: Tensor, token_rows: Tensor, newest: Tensor, page_tables: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the step's tokens, int64: the `known` ones, or the newest token of the row for
    PENDING. Also returns the entries of page_tables [families, all rows, max_pages] for `rows`,
    int32 [families, num_rows, max_pages]."""
    tokens = torch.where(known == PENDING, newest[token_rows], known)
    return tokens, page_tables[:, rows]


def end(tokens: Tensor, rows: Tensor, newest: Tensor) -> None:
    """Store int32 `tokens` as the newest of `rows`. An unused row may occur many times."""
    newest.index_copy_(0, rows, tokens.long())
