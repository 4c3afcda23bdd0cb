"""PEFT's `rank_pattern` and `alpha_pattern`: values by module name.

A key is a regular expression that the end of a module's name must match, beginning at a dot or at
the start; the first key that matches counts, in the order of the file. Nearly all keys are plain
names and are looked up; of the others only those are taken that can't make matching slow, since
the config may come from anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from manyroots.errors import AdapterError

Value = TypeVar("Value", int, float)

_PLAIN = re.compile(r"\^?[\w.-]+")
_QUANTIFIER = re.compile(r"(?<!\\)(?:[*+?]|\{\d*,?\d*\})")
_MAX_KEY_CHARS = 200
_MAX_UNBOUNDED = 2
_MAX_EXPRESSIONS = 64


class Patterns(Generic[Value]):
    """Values that override a default for some modules."""

    def __init__(self, field: str, values: Mapping[str, Value]) -> None:
        self._values: dict[str, Value] = dict(values)
        self._plain: dict[str, int] = {}
        self._anchored: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for index, key in enumerate(values):
            if not _PLAIN.fullmatch(key):
                self._expressions.append((index, _compiled(field, key)))
            elif key.startswith("^"):
                self._anchored[key[1:]] = index
            else:
                self._plain[key] = index
        if len(self._expressions) > _MAX_EXPRESSIONS:
            raise AdapterError(
                f"{field} has {len(self._expressions)} regular expressions, above the limit of "
                f"{_MAX_EXPRESSIONS}; name the modules plainly."
            )
        self._in_order: list[Value] = list(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[str, Value]]:
        """In the order that decides which key counts."""
        return iter(self._values.items())

    def find(self, module: str) -> Value | None:
        """The value of the first key that matches the module's name."""
        if not self._in_order:
            return None
        found = [self._anchored[module]] if module in self._anchored else []
        if self._plain:
            found += [self._plain[end] for end in endings(module) if end in self._plain]
        first = min(found, default=len(self._in_order))
        for index, expression in self._expressions:
            if index > first:
                break
            if expression.match(module):
                first = index
                break
        return self._in_order[first] if first < len(self._in_order) else None


def endings(module: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    yield module
    position = module.find(".")
    while position != -1:
        yield module[position + 1 :]
        position = module.find(".", position + 1)


def _compiled(field: str, key: str) -> re.Pattern[str]:
    reason = _why_unsafe(key)
    if reason is None:
        try:
            return re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            reason = f"is not a regular expression: {error}"
    raise AdapterError(f"{field} has the key {key[:_MAX_KEY_CHARS]!r}, which {reason}.")


def _why_unsafe(key: str) -> str | None:
    """Matching must end soon for every name: no repeated groups, few unbounded repeats."""
    if len(key) > _MAX_KEY_CHARS:
        return f"has more than {_MAX_KEY_CHARS} characters; name the modules plainly"
    if re.search(r"\(\?(?!:)|\\\d", key):
        return "uses look-around, flags or back-references; name the modules plainly"
    if re.search(r"\)\s*(?:[*+]|\{)", key):
        return "repeats a group; name the modules plainly"
    unbounded = [
        quantifier
        for quantifier in _QUANTIFIER.findall(key)
        if quantifier in "*+" or quantifier.endswith(",}")
    ]
    if len(unbounded) > _MAX_UNBOUNDED or re.search(r"\{\d{3,}", key):
        return "repeats too much; name the modules plainly"
    return None
