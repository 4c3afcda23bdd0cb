"""The device's memory of one family of layers: one tensor, cut into units.

Takes a number of units and the shape of a layer's memory, keys and values of a page or a state;
gives views by layer for the kernels. A unit's bytes for all layers are adjacent, so that moving it,
or saving a state, is one contiguous copy. Knows nothing of a unit's owner or content.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from manyroots.errors import ConfigError
from manyroots.store.untouched_memory import PAGE_BYTES, UntouchedMemory

PART_ALIGNMENT = 16
"""Every part of a unit starts at a multiple of this many bytes: the width of kernel loads."""


class UnitArena(Protocol):
    """Units of one family, on any tier."""

    data: Tensor
    """[num_units, ...], a unit's bytes in one piece."""


class Arena:
    """Owns `data`, the device's units, which layers read and write."""

    spare_unit: int | None = None
    """The unit that padding writes to; None if padding writes nothing."""
    _layers: Sequence[Any]

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        units: str,
        flags: str = "--kv-cache-memory-bytes, --num-gpu-blocks-override or "
        "--gpu-memory-utilization",
    ) -> None:
        """`units` and `flags`: what is too much, and what lowers it, if the device refuses."""
        try:
            self.data, self._memory = _zeros(shape, dtype, device)
        except (RuntimeError, MemoryError) as error:
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise ConfigError(
                f"{units} need {gib:.1f} GiB on {device}, and it does not have them; lower {flags}."
            ) from error

    def layer(self, index: int) -> Any:
        """The memory of the layer with this index in the family."""
        return self._layers[index]

    def give_back(self, units: Sequence[int]) -> None:
        """Nothing reads what these units hold; their memory may serve something else until they are
        written again. Gives back the system's pages that lie wholly within runs of units."""
        if self._memory is None:
            raise RuntimeError("a plan lends units of a device that can't give their memory back")
        size = self.data[0].numel() * self.data.itemsize
        for begin, end in _runs(units):
            first = -(-begin * size // PAGE_BYTES) * PAGE_BYTES
            last = end * size // PAGE_BYTES * PAGE_BYTES
            if last > first:
                self._memory.give_back(first, last - first)


class PageArena(Arena):
    """`[num_pages, num_layers, *shape]`, where `shape` is one layer's part of a page, of which a
    layer has the view `[num_pages, *shape]`. FP8 is stored as bytes, which every copy supports."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kept = torch.uint8 if dtype.itemsize == 1 else dtype
        pages = f"{num_pages} pages of {page_size} tokens"
        super().__init__((num_pages, num_layers, *shape), kept, device, pages)
        self._layers = self.data.view(dtype).unbind(1)


@dataclass(frozen=True, slots=True)
class PartShape:
    """One tensor of a layer's state, or of its part of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes including the padding before the next part."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def state_bytes(parts: Sequence[PartShape], num_layers: int) -> int:
    """Bytes of one unit."""
    return num_layers * sum(part.num_bytes for part in parts)


class PagePartsArena(Arena):
    """`[num_pages, bytes]`: a layer has a view `[num_pages, *shape]` of each of its parts."""

    def __init__(
        self, num_pages: int, parts: Sequence[PartShape], num_layers: int, device: torch.device
    ) -> None:
        shape = (num_pages, state_bytes(parts, num_layers))
        super().__init__(shape, torch.uint8, device, f"{num_pages} pages")
        self._layers = _views_by_layer(self.data, parts, num_layers)


class StateArena(Arena):
    """`[num_units + 1, bytes]`: states of sequences, working ones and saved ones. A layer has a
    view `[num_units + 1, *shape]` of each part. The unit after the last is spare; padding writes
    its states there."""

    def __init__(
        self, num_units: int, parts: Sequence[PartShape], num_layers: int, device: torch.device
    ) -> None:
        self.spare_unit = num_units
        shape = (num_units + 1, state_bytes(parts, num_layers))
        flags = "--max-num-seqs or --checkpoint-memory-bytes"
        super().__init__(shape, torch.uint8, device, f"{num_units} states", flags)
        self._layers = _views_by_layer(self.data, parts, num_layers)


def _views_by_layer(
    data: Tensor, parts: Sequence[PartShape], num_layers: int
) -> list[tuple[Tensor, ...]]:
    """Of each layer, a view of each of its parts."""
    size = state_bytes(parts, 1)
    return [tuple(_views(data, parts, layer * size)) for layer in range(num_layers)]


def _views(data: Tensor, parts: Sequence[PartShape], begin: int) -> Iterator[Tensor]:
    ends = accumulate((part.num_bytes for part in parts), initial=begin)
    for part, (start, _) in zip(parts, pairwise(ends), strict=True):
        size = math.prod(part.shape) * part.dtype.itemsize
        flat = data[:, start : start + size].view(part.dtype)
        yield flat.view(-1, *part.shape)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, UntouchedMemory | None]:
    """On a CPU also the memory, of which parts can be given back.

    Zeros, not empty: kernels read whole pages and mask the tail, and a masked NaN that happened to
    lie in fresh memory would still poison the sum."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    # The system allocates pages on first use: a large arena costs nothing until it is used. torch
    # would write every byte. Too large a size is refused now, not at the last page.
    memory = UntouchedMemory(math.prod(shape) * dtype.itemsize)
    return memory.data.view(dtype).view(shape), memory


def _runs(units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, each with the number after its last."""
    numbers = np.sort(np.asarray(units))
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    for run in np.split(numbers, cuts):
        yield int(run[0]), int(run[-1]) + 1
