"""What a GGUF file says before its tensors: key-value pairs, and where each tensor lies.

Takes a path or the file's bytes; gives plain Python values. The tensors themselves are never
touched, and a vocabulary takes milliseconds where the `gguf` package takes seconds. Every length
in the file is checked against the file's size before it is believed.

Layout: magic, version, counts, key-value pairs, tensor descriptions, padding, tensor data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyroots.errors import ModelError
from manyroots.files.git_lfs import remedy_of

DEFAULT_ALIGNMENT = 32
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 8
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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is written."""

    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: int
    """The number of its quantization type."""
    offset: int
    """From the start of the tensor data."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensor data."""

    metadata: dict[str, Any]
    """Arrays are lists."""
    tensors: dict[str, TensorInfo]
    data_start: int


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header with its value."""
    with open_mapped(path) as data:
        return read_header(path, data).metadata


def open_mapped(path: Path) -> mmap.mmap:
    """The file's bytes, read only when touched."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """The header at the beginning of `data`; `path` is for the error."""
    try:
        return _Cursor(data).read()
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    remedy = remedy_of(path, "download or copy it again")
    return ModelError(f"{path} is not a readable GGUF file ({error}); {remedy}.")


class _Cursor:
    """A place in the header. Raises ValueError or struct.error on anything malformed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GGUFHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError(f"it begins with {self._data[:4]!r} instead of {_MAGIC!r}")
        self._at = 4
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, known are {_VERSIONS}")
        num_tensors, num_keys = self._count(), self._count()
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            values[key] = self._value(self._scalar(_U32), depth=0)
        tensors = dict(self._tensor() for _ in range(num_tensors))
        alignment = int(values.get("general.alignment", DEFAULT_ALIGNMENT))
        return GGUFHeader(values, tensors, data_start=-(-self._at // alignment) * alignment)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        num_dimensions = self._scalar(_U32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        # Columns come first in the file.
        shape = tuple(reversed([self._scalar(_U64) for _ in range(num_dimensions)]))
        return name, TensorInfo(shape, kind=self._scalar(_U32), offset=self._scalar(_U64))

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
        if kind == _STRING:
            return self._strings(count)
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

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has 100,000 of them."""
        data, at, size, length_at = self._data, self._at, len(self._data), _U64.unpack_from
        found = []
        for _ in range(count):
            start = at + _U64.size
            at = start + length_at(data, at)[0]
            if at > size:
                raise ValueError(f"byte {start} promises {at - start} bytes beyond the end")
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return found

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
