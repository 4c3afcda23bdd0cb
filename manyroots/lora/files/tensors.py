"""What the header of a safetensors file says of one tensor, and what it may say."""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_ELEMENT = {"F32": 4, "F16": 2, "BF16": 2}
MAX_NAME_CHARS = 1024


class TensorEntry(NamedTuple):
    """One tensor of the file; offsets count from the first byte of data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
