"""The mask of a block of prefill queries, cut out of one shared triangle.

Takes how many queries a block has and how many keys its last query sees; gives an additive mask.
A query's own position is at the lower right: the last query of a block sees all `context_len`
keys, the one before it one less. All masks with the same alignment are therefore views into one
larger mask, which is kept; nothing is built per layer and seldom anything per step. With a window
the triangle is a band: a query doesn't see keys that are `window` or further before its own.
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

MIN_WINDOW_BLOCK = 64
"""Queries per block behind a window that is no longer."""

MAX_PAGE_SIZE = 1024
"""The largest page the settings allow: how far whole pages may reach past the context."""


def block_size(context_len: int, window: int = 0) -> int:
    """How many queries to attend with at a time over this many keys."""
    if not window:
        return max(16, min(MAX_BLOCK, MAX_MASK_ELEMENTS // _width(context_len)))
    # A block sees its window and itself: of a short window's keys, a long one would mask most.
    most = min(MAX_BLOCK, max(MIN_WINDOW_BLOCK, window))
    return max(16, min(most, MAX_MASK_ELEMENTS // _width(min(context_len, window + most))))


def causal_bias(
    num_queries: int,
    context_len: int,
    num_keys: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
) -> Tensor:
    """Mask [num_queries * group, num_keys]; row r is query r // group.

    `num_keys` is `context_len` rounded up to whole pages; the keys past it are hidden from all.
    With a window, `context_len` counts from the first key that the first query sees.
    """
    width = _width(context_len)
    block = block_size(context_len, window)
    triangle = _triangle(block, width, group, dtype, device, window)
    first_key = width - context_len
    bias = triangle[-num_queries * group :, first_key : first_key + num_keys]
    # CUDA's kernels want aligned rows, which a view from the middle does not have.
    return bias if device.type == "cpu" else bias.contiguous()


def _width(context_len: int) -> int:
    return 1 << max(10, (context_len - 1).bit_length())


@lru_cache(maxsize=12)
def _triangle(
    block: int, width: int, group: int, dtype: torch.dtype, device: torch.device, window: int
) -> Tensor:
    """The last of `block` queries sees `width` keys, or the last `window` of these; those after
    them are hidden from all."""
    query = torch.arange(block * group, device=device) // group
    own = query[:, None] + (width - block)
    key = torch.arange(width + MAX_PAGE_SIZE, device=device)
    hidden = key > own
    if window:
        hidden |= key <= own - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return bias.masked_fill_(hidden, float("-inf"))
