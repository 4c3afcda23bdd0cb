"""Units in host memory, each with the layout of the device's.

Takes the device's arena of one family; gives the same rows on the host. They are page-locked if the
device is a GPU, so that copies are fast and asynchronous. A unit is one row of `data`.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.errors import ConfigError
from manyroots.store.host_memory import lock_pages

UnitRows = npt.NDArray[np.uint8]
"""[num_units, bytes of one unit]; the code that moves them does not interpret them."""


class HostArena:
    """One family's units on the host."""

    def __init__(self, num_units: int, like: Tensor) -> None:
        """`like`: the device's `data`."""
        shape = (num_units, *like.shape[1:])
        try:
            self.data = _allocate(shape, like.dtype, is_locked=like.is_cuda)
        except (RuntimeError, MemoryError) as error:
            gib = math.prod(shape) * like.dtype.itemsize / 2**30
            raise ConfigError(
                f"the host tier needs {gib:.1f} GiB for {num_units} pages, and the machine does "
                "not have them; lower --kv-offloading-size or --num-host-pages."
            ) from error


def rows_of(data: Tensor) -> UnitRows:
    """An arena on the CPU or the host as rows of bytes, in the same memory."""
    rows: UnitRows = data.reshape(len(data), -1).view(torch.uint8).numpy()
    return rows


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, *, is_locked: bool) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise MemoryError  # raised now, not when the last unit is touched
    # Memory is allocated on first use, so unused memory costs nothing.
    memory = np.zeros(num_bytes, np.uint8)
    if is_locked:
        lock_pages(memory)
    return torch.from_numpy(memory).view(dtype).view(shape)
