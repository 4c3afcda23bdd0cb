"""The mask of a block of prefill queries, cut out of one shared triangle.

Takes how many queries a block has and how many keys its last query sees; gives an additive mask.
A query's own position is at the lower right: the last query of a block sees all `context_len`
keys, the one before it one less. All masks with the same alignment are therefore views into one
larger mask, which is kept; nothing is built per layer and seldom anything per step.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MAX_BLOCK = 256
"""Most queries per block. Causal blocks skip the keys after them, so smaller blocks compute
less; larger blocks make better matrix products."""

MAX_MASK_ELEMENTS = 1 << 19
"""Bounds block times keys, so that a long context gets narrower blocks, not a larger mask."""

MAX_PAGE_SIZE = 1024
"""The largest page the settings allow: how far whole pages may reach past the context."""


def block_size(context_len: int) -> int:
    """How many queries to attend with at a time over this many keys."""
    return max(16, min(MAX_BLOCK, MAX_MASK_ELEMENTS // _width(context_len)))


def causal_bias(
    num_queries: int,
    context_len: int,
    num_keys: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Mask [num_queries * group, num_keys]; row r is query r // group.

    `num_keys` is `context_len` rounded up to whole pages; the keys past it are hidden from all.
    """
    width = _width(context_len)
    triangle = _triangle(block_size(context_len), width, group, dtype, device)
    first_key = width - context_len
    bias = triangle[-num_queries * group :, first_key : first_key + num_keys]
    # CUDA's kernels want aligned rows, which a view from the middle does not have.
    return bias if device.type == "cpu" else bias.contiguous()


def _width(context_len: int) -> int:
    return 1 << max(10, (context_len - 1).bit_length())


@lru_cache(maxsize=8)
def _triangle(
    block: int, width: int, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The last of `block` queries sees `width` keys; those after them are hidden from all."""
    query = torch.arange(block * group, device=device) // group
    key = torch.arange(width + MAX_PAGE_SIZE, device=device)
    hidden = key > query[:, None] + (width - block)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return bias.masked_fill_(hidden, float("-inf"))
