"""One number for all plans of a run: equal exactly where every plan was.

Walks whatever a plan is made of, so that a field added to it counts without a change here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from manyroots.step import Plan


class PlanDigest:
    """A running digest."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, plan: Plan) -> None:
        parts: list[str | bytes] = []
        _tell(plan, parts)
        self._hash.update(b"".join([p.encode() if isinstance(p, str) else p for p in parts]))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _tell(value: object, parts: list[str | bytes]) -> None:
    """Every value goes in with its type and length, so that no two plans read alike."""
    if isinstance(value, int | str | None):  # most of them
        text = repr(value)
        parts.append(f"{type(value).__name__}{len(text)}:{text}")
    elif isinstance(value, np.ndarray):
        parts.append(f"{value.dtype.str}{value.shape}")
        parts.append(value.tobytes())
    elif isinstance(value, Mapping):
        _tell(tuple(value.items()), parts)
    elif isinstance(value, tuple | list):
        parts.append(f"({len(value)}")
        for item in value:
            _tell(item, parts)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts.append(type(value).__name__)
        for name in _field_names(type(value)):
            _tell(getattr(value, name), parts)
    else:
        text = repr(value)
        parts.append(f"{type(value).__name__}{len(text)}:{text}")


@cache
def _field_names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(spec.name for spec in dataclasses.fields(cls))
