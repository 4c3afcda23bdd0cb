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
        self._feed(plan)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _feed(self, value: object) -> None:
        """Every value goes in with its type and length, so that no two plans read alike."""
        if isinstance(value, int | str | None):  # most of them
            self._feed_text(value)
        elif isinstance(value, np.ndarray):
            self._hash.update(f"{value.dtype.str}{value.shape}".encode())
            self._hash.update(value.tobytes())
        elif isinstance(value, Mapping):
            self._feed(tuple(value.items()))
        elif isinstance(value, tuple | list):
            self._hash.update(f"({len(value)}".encode())
            for item in value:
                self._feed(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._hash.update(type(value).__name__.encode())
            for name in _field_names(type(value)):
                self._feed(getattr(value, name))
        else:
            self._feed_text(value)

    def _feed_text(self, value: object) -> None:
        text = repr(value)
        self._hash.update(f"{type(value).__name__}{len(text)}:{text}".encode())


@cache
def _field_names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(spec.name for spec in dataclasses.fields(cls))
