"""One number for all plans of a run: equal exactly where every plan was.

Walks whatever a plan is made of, so that a field added to it counts without a change here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from manyroots.step import Plan


class PlanDigest:
    """A running digest."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, plan: Plan) -> None:
        parts: list[bytes] = []
        _tell(plan, parts)
        self._hash.update(b"".join(parts))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _tell(value: object, parts: list[bytes]) -> None:
    """Every value goes in with its type and length, so that no two plans read alike."""
    kind: Any = type(value)
    if kind is int:  # most of them
        parts.append(_of_int(value))
    elif kind is tuple or isinstance(value, tuple | list):
        assert isinstance(value, tuple | list)
        parts.append(b"(%d" % len(value))
        for item in value:
            _tell(item, parts)
    elif kind is np.ndarray:
        assert isinstance(value, np.ndarray)
        parts.append(_of_array(value.dtype, value.shape))
        parts.append(value.tobytes())
    elif isinstance(value, Mapping):
        _tell(tuple(value.items()), parts)
    elif (names := _field_names(kind)) is not None:
        parts.append(kind.__name__.encode())
        for name in names:
            _tell(getattr(value, name), parts)
    else:
        text = repr(value)
        parts.append(f"{kind.__name__}{len(text)}:{text}".encode())


@lru_cache(4096)
def _of_int(value: object) -> bytes:
    text = str(value)
    return f"int{len(text)}:{text}".encode()


@lru_cache(4096)
def _of_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return f"{dtype.str}{shape}".encode()


@cache
def _field_names(cls: type[Any]) -> tuple[str, ...] | None:
    """None where it is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple(spec.name for spec in dataclasses.fields(cls))
