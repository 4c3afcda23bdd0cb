"""One GGUF file: its metadata, and its tensors by name.

Takes a path; reads the header at once and tensors when asked, as float32. Knows the file format
and no model. The header is parsed here because the `gguf` package takes seconds over a
vocabulary that this reads in milliseconds; undoing the quantization is left to that package.

Layout: magic, version, counts, key-value pairs, tensor descriptions, padding, tensor data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manyroots.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is written."""

    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    kind: int
    """The number of its quantization type."""
    offset: int
    """From the start of the tensor data."""


class GGUFFile:
    """The open file. Reading is by memory map: nothing is held that is not asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = _Header(self._bytes)
            self.metadata, self.tensors = header.read()
            alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
            self._data_start = -(-header.position // alignment) * alignment
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ModelError(
                f"{path} is not a readable GGUF file ({error}); download or copy it again."
            ) from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantized."""
        info = self.tensors[name]
        quants, kinds = _gguf_package()
        try:
            kind = kinds(info.kind)
            shape = quants.quant_shape_to_byte_shape(info.shape, kind)
            start = self._data_start + info.offset
            count = int(np.prod(shape))
            raw = np.frombuffer(self._bytes, dtype=np.uint8, count=count, offset=start)
            values = quants.dequantize(raw.reshape(shape), kind)
        except (ValueError, NotImplementedError) as error:
            raise ModelError(
                f"tensor {name!r} of {self.path} (type {info.kind}, {info.shape}) can't be read "
                f"({error}); the file is incomplete, or in a format this version lacks."
            ) from error
        return np.array(values, dtype=np.float32).reshape(info.shape)


def _gguf_package() -> tuple[Any, Any]:
    """The `gguf` package's arithmetic and its types; only those who read such files need it."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ModelError(
            "GGUF files need the gguf package, which is not installed; pip install gguf."
        ) from error
    return quants, GGMLQuantizationType


class _Header:
    """A cursor over the part of the file before the tensor data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        num_tensors, num_pairs = self._number("<Q"), self._number("<Q")
        metadata = {self._string(): self._value(self._number("<I")) for _ in range(num_pairs)}
        return metadata, dict(self._tensor() for _ in range(num_tensors))

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        # Columns come first in the file.
        shape = tuple(reversed([self._number("<Q") for _ in range(self._number("<I"))]))
        return name, TensorInfo(shape, kind=self._number("<I"), offset=self._number("<Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_scalar(kind))
        item, count = self._number("<I"), self._number("<Q")
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(count)]
        raw = self._take(count * struct.calcsize(_scalar(item)))
        return np.frombuffer(raw, dtype=_scalar(item)).tolist()

    def _string(self) -> str:
        # A tokenizer may hold bytes that are no text by themselves; nothing here reads those.
        return self._take(self._number("<Q")).decode("utf-8", errors="surrogateescape")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, in the middle of its header")
        taken = self._data[self.position : end]
        self.position = end
        return taken


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of unknown type {kind}")
    return _SCALARS[kind]
