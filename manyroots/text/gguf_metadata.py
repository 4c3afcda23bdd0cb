"""Reads the key-value header of a GGUF file, and nothing else of it.

Takes a path; gives a dict of plain Python values. The tensors behind the header are never
touched, so this takes milliseconds where a full reader takes seconds. Every length in the file
is checked against the file's size before it is believed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from manyroots.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_MAX_ARRAY_DEPTH = 4
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = _SCALARS[4]
_U64 = _SCALARS[10]


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header with its value; arrays become lists."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(
            f"{path} is not a GGUF file that can be read: {error}. Download it again."
        ) from error


class _Header:
    """A cursor over the header. Raises ValueError or struct.error on anything malformed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError(f"it begins with {self._data[:4]!r} instead of {_MAGIC!r}")
        self._at = 4
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are {_VERSIONS}")
        self._scalar(_U64)  # the number of tensors
        num_keys = self._count()
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            values[key] = self._value(self._scalar(_U32), depth=0)
        return values

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise ValueError(f"byte {self._at} names the unknown value type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        if depth == _MAX_ARRAY_DEPTH:
            raise ValueError(f"arrays are nested deeper than {_MAX_ARRAY_DEPTH}")
        kind = self._scalar(_U32)
        count = self._count()
        if kind not in _SCALARS:
            return [self._value(kind, depth + 1) for _ in range(count)]
        item = _SCALARS[kind]
        return [value for (value,) in item.iter_unpack(self._bytes(count * item.size))]

    def _count(self) -> int:
        """A number of items, each of which takes at least one byte of what is left."""
        count = self._scalar(_U64)
        left = len(self._data) - self._at
        if count > left:
            raise ValueError(f"byte {self._at} promises {count} items with {left} bytes left")
        return int(count)

    def _string(self) -> str:
        return self._bytes(self._scalar(_U64)).decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"byte {self._at} promises {length} bytes beyond the end")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _scalar(self, item: struct.Struct) -> Any:
        (value,) = item.unpack_from(self._data, self._at)
        self._at += item.size
        return value
