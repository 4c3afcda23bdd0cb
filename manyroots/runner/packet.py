"""Many small arrays as one copy to the device.

A copy from host to device costs microseconds to launch whatever its size, and a step has a dozen
small inputs. A `PacketLayout` gives each a place in one buffer: numpy fills the host's side,
kernels read views of the device's. A graph's inputs have one device buffer for good; what is
copied into it next waits, on the stream, for the steps that still read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}

Arrays = Mapping[str, np.ndarray]


class PacketLayout:
    """Where each named array lies in a buffer."""

    def __init__(self, arrays: Arrays) -> None:
        """As large and of the types that `arrays` are; their values do not matter."""
        self._places: dict[str, tuple[int, np.dtype[np.generic], tuple[int, ...]]] = {}
        at = 0
        for name, array in arrays.items():
            self._places[name] = (at, array.dtype, array.shape)
            at += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = at

    def pack(self, arrays: Arrays, *, pin: bool) -> Tensor:
        """The arrays in a host buffer, page-locked if `pin`. Shapes must be the layout's."""
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pin)
        for name, array in self.host_arrays(buffer).items():
            array[...] = arrays[name]
        return buffer

    def host_arrays(self, buffer: Tensor) -> dict[str, np.ndarray]:
        """The arrays of a host buffer: what is written to them is written there."""
        raw = buffer.numpy()
        return {
            name: np.ndarray(shape, dtype, raw, at)
            for name, (at, dtype, shape) in self._places.items()
        }

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays of a buffer, as tensors where it is."""
        return {
            name: buffer[at : at + math.prod(shape) * dtype.itemsize]
            .view(_TORCH[dtype])
            .view(shape)
            for name, (at, dtype, shape) in self._places.items()
        }


class KeptArrays(dict[str, np.ndarray]):
    """Arrays that are sent again after some of their values were changed in place.

    They are packed once and then lie in their host buffer. A value may be changed when the copy of
    the one before has ended.
    """

    _buffer: Tensor | None = None

    def pack(self, layout: PacketLayout, *, pin: bool) -> Tensor:
        """As `PacketLayout.pack`; `layout` is the same each time."""
        if self._buffer is None:
            self._buffer = layout.pack(self, pin=pin)
            self.update(layout.host_arrays(self._buffer))
        return self._buffer


def send(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """The arrays on `device`, sent by one asynchronous copy. On a CPU, nothing is copied."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    layout = PacketLayout(arrays)
    return layout.views(layout.pack(arrays, pin=True).to(device, non_blocking=True))
