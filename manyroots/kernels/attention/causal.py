"""The mask of a block of prefill queries, cut out of one shared triangle.

Takes the number of queries in a block and the number of keys that its last query sees; gives an
additive mask. The diagonal ends at the lower right: the last query of a block sees all
`context_len` keys, the query before it one less. All masks with the same alignment are therefore
views into one larger mask, which is cached. Nothing is built per layer, and seldom anything per
step. With a window the triangle is a band: a query does not see keys at a distance of `window` or
more.
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
"""Queries per block if the window is no longer than this."""

MAX_PAGE_SIZE = 1024
"""The largest page that the settings allow, so the furthest that whole pages reach past the
context."""


def block_size(context_len: int, window: int = 0) -> int:
    """The number of queries that attend at a time over this many keys."""
    if not window:
        return max(16, min(MAX_BLOCK, MAX_MASK_ELEMENTS // _width(context_len)))
    # A block sees its own window and itself; a long block would mask most keys of a short window.
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

    `num_keys` is `context_len` rounded up to whole pages; no query sees the keys past
    `context_len`. With a window, `context_len` counts from the first key that the first query sees.
    """
    width = _width(context_len)
    block = block_size(context_len, window)
    triangle = _triangle(block, width, group, dtype, device, window)
    first_key = width - context_len
    bias = triangle[-num_queries * group :, first_key : first_key + num_keys]
    # CUDA's kernels need aligned rows, and a view that starts inside a row is not aligned.
    return bias if device.type == "cpu" else bias.contiguous()


def _width(context_len: int) -> int:
    return 1 << max(10, (context_len - 1).bit_length())


@lru_cache(maxsize=12)
def _triangle(
    block: int, width: int, group: int, dtype: torch.dtype, device: torch.device, window: int
) -> Tensor:
    """The last of `block` queries sees `width` keys, or the last `window` of them. Later keys are
    hidden from all queries."""
    query = torch.arange(block * group, device=device) // group
    own = query[:, None] + (width - block)
    key = torch.arange(width + MAX_PAGE_SIZE, device=device)
    hidden = key > own
    if window:
        hidden |= key <= own - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return bias.masked_fill_(hidden, float("-inf"))
