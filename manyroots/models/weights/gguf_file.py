"""One GGUF file: its metadata, and its tensors by name.

Takes a path; reads the header at once and tensors when asked, as float32. Knows the file format
and no model. Undoing the quantization is left to the `gguf` package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manyroots.errors import ModelError
from manyroots.gguf_header import open_mapped, read_header


class GGUFFile:
    """The open file. Reading is by memory map: nothing is held that is not asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = open_mapped(path)
        header = read_header(path, self._bytes)
        self.metadata, self.tensors = header.metadata, header.tensors
        self._data_start = header.data_start

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantized."""
        info = self.tensors[name]
        quants, kinds = _gguf_package()
        try:
            kind = kinds(info.kind)
            shape = quants.quant_shape_to_byte_shape(info.shape, kind)
            start = self._data_start + info.offset
            count = math.prod(shape)
            raw = np.frombuffer(self._bytes, dtype=np.uint8, count=count, offset=start)
            values = quants.dequantize(raw.reshape(shape), kind)
        except (ValueError, NotImplementedError, ArithmeticError, IndexError) as error:
            raise ModelError(
                f"tensor {name!r} of {self.path} (type {info.kind}, {info.shape}) can't be read "
                f"({error}); the file is incomplete, or in a format this version lacks."
            ) from error
        # Plain numbers are a view of the file, which nobody may write to.
        return np.require(values, np.float32, "W").reshape(info.shape)


def _gguf_package() -> tuple[Any, Any]:
    """The `gguf` package's arithmetic and its types; only those who read such files need it."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ModelError(
            "GGUF files need the gguf package, which is not installed; pip install gguf."
        ) from error
    return quants, GGMLQuantizationType
