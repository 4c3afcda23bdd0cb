"""One GGUF file: its metadata, and its tensors by name.

Takes a path; reads the header at once and tensors on demand, as float32. For a model in several
files, takes the first path and reads all of them as one. Knows the file format and no model. The
`gguf` package undoes the quantization.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manyroots.errors import ModelError
from manyroots.files.gguf_header import GGUFHeader, TensorInfo, open_mapped, read_header
from manyroots.files.gguf_parts import check_part, check_tensors, parts_of
from manyroots.models.fields import shown

_ROWS_AT_ONCE = 64
"""The `gguf` package would convert 16 rows in a call, which takes 1.4 times as long."""


class GGUFFile:
    """The open file, as a memory map: only requested tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[mmap.mmap, int]] = {}
        """For each tensor: its file's bytes, and the offset at which tensors start."""
        self.metadata = self._open(path).metadata
        parts = parts_of(path, self.metadata)
        for number, part in enumerate(parts[1:], start=1):
            check_part(part, self._open(part).metadata, number, len(parts))
        check_tensors(path, self.metadata, len(self.tensors))

    def _open(self, path: Path) -> GGUFHeader:
        data = open_mapped(path)
        header = read_header(path, data)
        self.tensors |= header.tensors
        self._places |= dict.fromkeys(header.tensors, (data, header.data_start))
        return header

    def whole(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        """A key of the metadata that must be a whole number."""
        value = self._get(key, default)
        if type(value) is not int or value < least:
            raise ModelError(
                f"{key} of {self.path} is {shown(value)}; it must be a whole number of at least "
                f"{least}. Convert the model again."
            )
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A key of the metadata that must be a number."""
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise ModelError(
                f"{key} of {self.path} is {shown(value)}; it must be a number. Convert the model "
                "again."
            )
        return float(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} lacks {key} in its metadata; convert the model again.")
        return value

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantized."""
        info = self.tensors[name]
        quants, kinds = _gguf_package()
        try:
            kind = kinds(info.kind)
            shape = quants.quant_shape_to_byte_shape(info.shape, kind)
            data, data_start = self._places[name]
            count = math.prod(shape)
            raw = np.frombuffer(data, np.uint8, count=count, offset=data_start + info.offset)
            rows = raw.reshape(-1, shape[-1])
            values = np.empty((len(rows), info.shape[-1]), np.float32)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                some = rows[start : start + _ROWS_AT_ONCE]
                converted = quants.dequantize(some.reshape(1, -1), kind)  # as one row
                values[start : start + len(some)] = converted.reshape(len(some), -1)
        except (ValueError, NotImplementedError, ArithmeticError, IndexError) as error:
            raise ModelError(
                f"tensor {name!r} of {self.path} (type {info.kind}, {info.shape}) can't be read "
                f"({error}); the file is incomplete, or in a format this version lacks."
            ) from error
        return values.reshape(info.shape)


def _gguf_package() -> tuple[Any, Any]:
    """The `gguf` package's arithmetic and types; only readers of such files need it."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ModelError(
            "GGUF files need the gguf package, which is not installed; pip install gguf."
        ) from error
    return quants, GGMLQuantizationType
