"""How a step begins and ends: rows' state gathered, and their newest tokens kept; naive."""

from __future__ import annotations

import torch
from torch import Tensor

PENDING = -1
"""In the place of a token that only the device knows."""


def begin(
    known: Tensor, token_rows: Tensor, newest: Tensor, page_tables: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The step's tokens, int64: those that are `known`, or the newest one of the token's row where
    that is PENDING. And of page_tables [families, all rows, max_pages] those of `rows`, int32
    [families, num_rows, max_pages]."""
    tokens = torch.where(known == PENDING, newest[token_rows], known)
    return tokens, page_tables[:, rows]


def end(tokens: Tensor, rows: Tensor, newest: Tensor) -> None:
    """Keep int32 `tokens` as the newest of `rows`, of which one that nobody reads may occur many
    times."""
    newest.index_copy_(0, rows, tokens.long())
