"""Small arrays of the host on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def copied_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Flat int32 arrays on `device`; on a GPU with one asynchronous copy. A copy from memory that
    is not pinned would wait until the device has done all earlier work."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    # Each array starts at a multiple of 16 bytes, as kernels are compiled for.
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    pieces = torch.split(packed, sizes)
    for piece, array in zip(pieces, arrays, strict=True):
        piece[: len(array)] = torch.from_numpy(array)
    moved = torch.split(packed.to(device, non_blocking=True), sizes)
    return [piece[: len(array)] for piece, array in zip(moved, arrays, strict=True)]
