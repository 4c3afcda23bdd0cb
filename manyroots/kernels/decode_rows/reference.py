"""How a decode step begins and ends: rows' state gathered, and their newest tokens kept; naive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyroots.kernels.rope_write.inputs import RopeTable

PENDING = -1
"""In the place of a token that only the device knows."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the kernels of a decode step read of their rows."""

    tokens: Tensor
    """int64 [num_rows]"""
    page_tables: Tensor
    """int32 [families, num_rows, max_pages]"""
    ropes: tuple[RopeTable, ...]


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
    return Gathered(
        torch.where(known == PENDING, newest[rows], known),
        page_tables[:, rows],
        tuple(RopeTable(rope.cos[positions], rope.sin[positions]) for rope in ropes),
    )


def end(tokens: Tensor, finite: Tensor, rows: Tensor, newest: Tensor) -> Tensor:
    """Keep int32 `tokens` as the newest of `rows`, of which one that nobody reads may occur many
    times. Gives int32 [2, num_rows]: the tokens, and whether their logits were finite."""
    newest.index_copy_(0, rows, tokens.long())
    return torch.stack((tokens, finite.int()))
