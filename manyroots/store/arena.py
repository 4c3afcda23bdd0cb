"""The device pages of one family of layers: one tensor, cut into pages.

Takes a number of pages and the shape of a family's keys and values; gives a view per layer for
the kernels to write and read. A page's bytes for all layers lie together, so that moving a page
between tiers is one contiguous copy. Knows nothing of who owns a page or what it holds.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

from manyroots.errors import ConfigError


class PageArena:
    """Owns `[num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]`; 2 is keys, values."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, num_layers, 2, page_size, num_kv_heads, head_dim)
        try:
            # Zeros, not empty: kernels read whole pages and mask the tail, and a masked NaN that
            # happened to lie in fresh memory would still poison the sum.
            self.data = _zeros(shape, dtype, device)
        except (RuntimeError, MemoryError) as error:
            gib = torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise ConfigError(
                f"{num_pages} pages of {page_size} tokens need {gib:.1f} GiB on {device}, and it "
                "does not have them; lower --kv-cache-memory-bytes, --num-gpu-blocks-override or "
                "--gpu-memory-utilization."
            ) from error
        self._layers = self.data.unbind(1)

    def layer(self, index: int) -> Tensor:
        """A view of one layer: `[num_pages, 2, page_size, num_kv_heads, head_dim]`."""
        return self._layers[index]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed memory, which it hands out page by page as it is first
    # touched: a large arena costs nothing until it is used. torch would write every byte.
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise MemoryError  # said now, not when the last page is touched
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
