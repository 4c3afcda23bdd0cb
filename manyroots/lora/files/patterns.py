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
_MAX_KEY_CHARS = 200
_MAX_EXPRESSIONS = 64
_MAX_STEPS = 200_000_000
"""Of matching, over all modules of a file: some seconds at worst."""


class Patterns(Generic[Value]):
    """Values that override a default for some modules."""

    def __init__(self, field: str, values: Mapping[str, Value]) -> None:
        self._values: dict[str, Value] = dict(values)
        self._plain: dict[str, int] = {}
        self._anchored: dict[str, int] = {}
        self._expressions: list[tuple[int, _Expression]] = []
        self._field = field
        self._num_steps = 0
        for index, key in enumerate(values):
            if not _PLAIN.fullmatch(key):
                self._expressions.append((index, _Expression(field, key)))
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
            self._count_steps(expression, module)
            if expression.compiled.match(module):
                first = index
                break
        return self._in_order[first] if first < len(self._in_order) else None

    def _count_steps(self, expression: _Expression, module: str) -> None:
        """A clock would make it depend on the machine whether an adapter is served."""
        self._num_steps += expression.max_steps(module)
        if self._num_steps > _MAX_STEPS:
            raise AdapterError(
                f"{self._field} takes too long to match with all modules of the file; name the "
                "modules plainly."
            )


def endings(module: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    yield module
    position = module.find(".")
    while position != -1:
        yield module[position + 1 :]
        position = module.find(".", position + 1)


class _Expression:
    """A key that is a regular expression, simple enough that its work can be foretold.

    Counts are by character, so that what is escaped counts, too: rather too many than too few.
    """

    def __init__(self, field: str, key: str) -> None:
        plain_groups = key.replace("(?:", "(")
        self._num_repeats = sum(plain_groups.count(sign) for sign in "*+{")
        self._num_options = plain_groups.count("?")
        self._num_groups = plain_groups.count("(")
        self._num_bars = plain_groups.count("|")
        reason = self._why_refused(key)
        if reason is None:
            try:
                self.compiled = re.compile(rf"(.*\.)?({key})$")
            except (re.error, OverflowError) as error:
                reason = f"is not a regular expression ({error})"
        if reason is not None:
            raise AdapterError(
                f"{field} has the key {key[:_MAX_KEY_CHARS]!r}, which {reason}; name the modules "
                "plainly."
            )

    def max_steps(self, module: str) -> int:
        """Of matching one name: each dot may be where the key begins, and from there each part
        that may match in several ways multiplies."""
        num_starts = module.count(".") + 1
        ways: int = 2**self._num_options * (self._num_bars + 1) ** max(1, self._num_groups)
        repeats: int = len(module) ** self._num_repeats
        return num_starts * ways * repeats

    def _why_refused(self, key: str) -> str | None:
        if len(key) > _MAX_KEY_CHARS:
            return f"has more than {_MAX_KEY_CHARS} characters"
        if re.search(r"\(\?(?!:)|\\\d", key):
            return "uses look-around, flags or back-references"
        if re.search(r"\)\s*[*+{]", key):
            return "repeats a group"
        if self._num_repeats > 2 or self._num_options > 4 or self._num_groups > 2:
            return "repeats or branches too much"
        return None
