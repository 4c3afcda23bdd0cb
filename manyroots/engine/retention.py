"""Checks the ranges that a request asks the cache to keep (T13), of `LLM` and of HTTP alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from manyroots.errors import RequestError
from manyroots.messages import KeepRange

MAX_RANGES = 8
MAX_KEEP_S = 86_400.0
SHARE = 0.5
"""Of the cache, for marks of requests without a key of their own."""


class AskedRange(Protocol):
    """As a caller wrote it."""

    @property
    def until_token(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def for_s(self) -> float: ...


def checked_ranges(asked: Sequence[AskedRange]) -> list[KeepRange]:
    """Raises RequestError for numbers that can't be."""
    if len(asked) > MAX_RANGES:
        raise RequestError(
            f"retention has {len(asked)} ranges; give at most {MAX_RANGES}.", field="retention"
        )
    return [_checked(each, place) for place, each in enumerate(asked)]


def _checked(asked: AskedRange, place: int) -> KeepRange:
    for name, value, least, most in (
        ("until_token", asked.until_token, 1, 1 << 31),
        ("priority", asked.priority, 0, 100),
        ("for_s", asked.for_s, 0.0, MAX_KEEP_S),
    ):
        if not least <= value <= most:
            where = f"retention[{place}].{name}"
            raise RequestError(
                f"{where} is {value}; it must be from {least:g} to {most:g}.", field=where
            )
    return KeepRange(asked.until_token, asked.priority, asked.for_s)
