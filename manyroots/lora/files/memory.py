"""An adapter's two files in memory: what a program hands over without writing it to a disk.

Reads as open files do, so that everything that is checked of files is checked of these. Never
changes: the caller must not write to an adapter's memory until it is read.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from manyroots.lora.files.folder import CONFIG_FILE, WEIGHTS_FILE
from manyroots.lora.files.opened import AdapterFile


class MemoryFile(AdapterFile):
    """Pieces of memory, one after the other."""

    def __init__(self, name: str, pieces: Sequence[memoryview | bytes]) -> None:
        self.path = Path("(memory)", name)
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._ends = list(accumulate(len(piece) for piece in self._pieces))

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_into(self, view: memoryview, offset: int) -> None:
        if offset + len(view) > self.num_bytes:
            raise self._changed()
        number, num_read = bisect.bisect_right(self._ends, offset), 0
        while num_read < len(view):
            piece = self._pieces[number]
            start = offset + num_read - (self._ends[number] - len(piece))
            count = min(len(piece) - start, len(view) - num_read)
            # Slices of memory views would be copied while every other thread waits.
            np.copyto(
                np.frombuffer(view[num_read : num_read + count], np.uint8),
                np.frombuffer(piece[start : start + count], np.uint8),
            )
            num_read += count
            number += 1

    def bytes_at(self, offset: int, room: memoryview) -> memoryview:
        number = bisect.bisect_right(self._ends, offset)
        if number == len(self._ends) or offset + len(room) > self._ends[number]:
            return super().bytes_at(offset, room)  # of several pieces
        piece = self._pieces[number]
        start = offset - (self._ends[number] - len(piece))
        return piece[start : start + len(room)]

    def check_unchanged(self) -> None:
        """It can't have."""

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def write(self, folder: Path) -> None:
        """The same bytes as a file of a folder."""
        with (folder / self.path.name).open("xb") as file:
            file.writelines(self._pieces)


@dataclass(frozen=True, slots=True)
class MemoryAdapter:
    """What `adapter_config.json` and `adapter_model.safetensors` would hold."""

    config: MemoryFile
    weights: MemoryFile

    @staticmethod
    def of(config: bytes, weights: Sequence[memoryview | bytes]) -> MemoryAdapter:
        return MemoryAdapter(MemoryFile(CONFIG_FILE, [config]), MemoryFile(WEIGHTS_FILE, weights))
