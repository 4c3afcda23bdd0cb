"""The header of a safetensors file: which tensors lie where. Parsed here, trusting nothing.

Every byte of the data belongs to exactly one tensor, and each tensor has the bytes that its dtype
and shape ask for; anything else is refused before a byte of data is read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from manyroots.errors import AdapterError
from manyroots.lora.files.opened import AdapterFile
from manyroots.lora.files.plain_header import parse_plain
from manyroots.lora.files.strict_json import parse_object
from manyroots.lora.files.tensors import BYTES_PER_ELEMENT, MAX_NAME_CHARS, TensorEntry

MAX_HEADER_BYTES = 64 << 20
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 8
_MAX_SIZE = 1 << 63


class Header(NamedTuple):
    """Tensors in the order of their bytes."""

    tensors: tuple[TensorEntry, ...]
    raw: bytes
    """As in the file, without its length."""
    data_offset: int
    data_bytes: int


def read_header(file: AdapterFile) -> Header:
    return parse_header(file, header_bytes(file))


def header_bytes(file: AdapterFile) -> bytes:
    """As in the file, without its length."""
    if file.num_bytes < 8:
        raise _broken(file, f"it has {file.num_bytes} bytes, fewer than any safetensors file")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, file.num_bytes - 8):
        file.refuse_pointer()
        raise _broken(
            file,
            f"its header claims {length} bytes; the file has {file.num_bytes} and at most "
            f"{MAX_HEADER_BYTES} are read",
        )
    return file.read(8, length)


def parse_header(file: AdapterFile, raw: bytes) -> Header:
    """`raw`: its `header_bytes`."""
    tensors = parse_plain(raw) or _parse(file, raw)
    data_bytes = file.num_bytes - 8 - len(raw)
    needed = tensors[-1].end if tensors else 0
    if needed != data_bytes:
        raise _broken(file, f"its tensors need {needed} bytes of data and {data_bytes} are there")
    return Header(tuple(tensors), raw, 8 + len(raw), data_bytes)


def _parse(file: AdapterFile, raw: bytes) -> list[TensorEntry]:
    fields = parse_object(raw, f"the header of {file.path}", _described)
    fields.pop("__metadata__", None)
    tensors = [_entry(file, name, about) for name, about in fields.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _check_contiguous(file, tensors)
    return tensors


class _Described(NamedTuple):
    """What the header says of one tensor. Not a dict: there are tens of thousands of them, and
    the garbage collector would walk through all of them several times."""

    dtype: Any
    shape: Any
    offsets: Any


def _described(fields: dict[str, Any]) -> Any:
    if fields.keys() != _FIELDS:
        return fields
    shape, offsets = fields["shape"], fields["data_offsets"]
    return _Described(
        fields["dtype"],
        tuple(shape) if isinstance(shape, list) else shape,
        tuple(offsets) if isinstance(offsets, list) else offsets,
    )


def _entry(file: AdapterFile, name: str, about: Any) -> TensorEntry:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise _broken(file, f"the tensor name {name[:100]!r} is too long or can't be printed")
    if not isinstance(about, _Described):
        raise _broken(file, f"{name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = about
    size = BYTES_PER_ELEMENT.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise AdapterError(
            f"{name!r} in {file.path} has dtype {_listed(dtype)}; F32, F16 and BF16 are served. "
            "Convert the adapter."
        )
    if not _are_sizes(shape):
        raise _broken(file, f"{name!r} has shape {_listed(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(file, f"{name!r} has data_offsets {_listed(offsets)}")
    start, end = offsets
    if end - start != math.prod(shape) * size:
        raise _broken(
            file, f"{name!r} is {dtype} {list(shape)} but has {end - start} bytes by its offsets"
        )
    return TensorEntry(name, dtype, shape, start, end)


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, tuple) or len(values) > _MAX_DIMS:
        return False
    for value in values:  # noqa: SIM110  all() is slower, and this runs twice for each tensor
        if type(value) is not int or not 0 <= value < _MAX_SIZE:
            return False
    return True


def _listed(values: Any) -> str:
    """As the header has it, shortened."""
    return repr(list(values) if isinstance(values, tuple) else values)[:200]


def _check_contiguous(file: AdapterFile, tensors: list[TensorEntry]) -> None:
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps another tensor" if tensor.start < position else "leaves a hole"
            raise _broken(
                file, f"{tensor.name!r} begins at {tensor.start} and {what} at {position}"
            )
        position = tensor.end


def _broken(file: AdapterFile, what: str) -> AdapterError:
    return AdapterError(
        f"{file.path} is not a whole safetensors file: {what}. Copy or save it again."
    )
