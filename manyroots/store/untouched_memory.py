"""CPU memory that costs nothing before it is used, and can be given back.

Takes a number of bytes; gives them as a flat tensor of zeros. The system allocates pages on first
use, so room for many adapters of a high rank, which may never come, costs nothing. Memory that was
given back reads as zeros again.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
"""A Linux constant, which Python has from 3.13 on."""


class UntouchedMemory:
    """Zeros until they are written."""

    def __init__(self, num_bytes: int, *, is_counted: bool = True) -> None:
        """Raises MemoryError for more than the machine has. With `is_counted` False it reserves
        only addresses, and other code counts what is used."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if not is_counted:
            flags |= _MAP_NORESERVE
        elif num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError(f"{num_bytes} bytes")
        try:
            self._pages = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes") from error
        self.data: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)[:num_bytes]

    def give_back(self, first: int, num_bytes: int) -> None:
        """Give back the bytes from `first` on, a multiple of PAGE_BYTES; they are no longer
        used."""
        self._pages.madvise(mmap.MADV_DONTNEED, first, num_bytes)
