"""Moves the bytes of an adapter's file into host memory: checks each once, and stores it in place.

Takes chunks in the order of the file, each on the thread that has just read it. The chunk is then
in that core's cache, so checking and moving it costs little. Steps are launched from the same
process meanwhile, so nothing here holds the interpreter's lock for long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from manyroots.lora.files.digest import PIECE_BYTES
from manyroots.lora.files.pairs import Piece
from manyroots.lora.files.tensors import TensorEntry

FlatBytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
ByteOffsets = np.ndarray[tuple[int], np.dtype[np.int64]]
"""The start of each of the file's tensors in memory, in bytes."""

_SIGNED = {"F32": np.int32, "F16": np.int16, "BF16": np.int16}
_UNSIGNED = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
_INFINITY = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""As an integer. Every finite number of the same sign is smaller, every NaN larger."""


_MIN_STEPS = 512
"""NumPy keeps the interpreter's lock while it moves up to 500 steps, so what is read at once has
more."""


def are_finite(raw: memoryview, dtype: str) -> bool:
    bits = np.frombuffer(raw, _SIGNED[dtype])
    infinity = _INFINITY[dtype]
    sign = 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinity and bits.view(_UNSIGNED[dtype]).max() < sign + infinity)


def places_of(pieces: Sequence[Piece], tensors: Sequence[TensorEntry]) -> ByteOffsets:
    """First all A, then all B, each in its own order of tensors."""
    order = list(chain.from_iterable(piece.tensors for piece in pieces))
    sizes = np.array([tensors[index].end - tensors[index].start for index in order], np.int64)
    places = np.empty(len(tensors), np.int64)
    places[order] = np.cumsum(sizes) - sizes
    return places


@dataclass(frozen=True, slots=True)
class Moves:
    """The destinations of a file of one dtype, in pieces that divide every tensor and every chunk:
    one call per chunk, for any mix of tensors."""

    dtype: str
    step: int
    """Bytes of a piece."""
    to: ByteOffsets
    """The piece of memory for each piece of the file."""

    @classmethod
    def between(cls, tensors: Sequence[TensorEntry], places: ByteOffsets) -> Moves:
        """From the order of the file to that of memory."""
        num_bytes = tensors[-1].end
        starts = np.fromiter((tensor.start for tensor in tensors), np.int64, len(tensors))
        most = max(1, PIECE_BYTES // _MIN_STEPS)
        step = math.gcd(PIECE_BYTES, most, num_bytes, int(np.gcd.reduce(starts)))
        counts = np.diff(starts, append=num_bytes) // step
        to = np.arange(num_bytes // step)
        to += np.repeat((places - starts) // step, counts)
        return cls(tensors[0].dtype, step, to)


class ArrivingBytes:
    """Memory that a file of one dtype is read into, in another order than the file's."""

    def __init__(self, memory: FlatBytes, moves: Moves) -> None:
        """The memory has as many bytes as the file."""
        self._moves = moves
        self._kind = np.dtype((np.void, moves.step))
        self._memory = memory.view(self._kind)
        self.is_finite = True

    def take(self, start: int, chunk: memoryview) -> None:
        """Take the file's bytes from `start` on. Called on any thread."""
        if not are_finite(chunk, self._moves.dtype):
            self.is_finite = False
        first = start // self._moves.step
        pieces = np.frombuffer(chunk, self._kind)
        self._memory[self._moves.to[first : first + len(pieces)]] = pieces
