"""PEFT's `rank_pattern` and `alpha_pattern`: values by module name; and names by expression.

A key is a regular expression that the end of a module's name must match, beginning at a dot or at
the start; the first key that matches counts, in the order of the file. Nearly all keys are names,
in which a dot stands for any character, and are looked up; RE2 matches the others.
Both take time and memory that are bounded, since the config may come from anywhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

from manyroots.errors import AdapterError

Value = TypeVar("Value", int, float)

_PLAIN = re.compile(r"\^?[\w.-]+", re.ASCII)
_MAX_KEY_CHARS = 2000
_MAX_LOOKUPS = 1_000_000
"""Of plain keys, over all modules of a file: a few seconds at worst."""
_MAX_NAMED = 6
_MAX_STEPS = 300_000_000
"""Of expressions: characters of names times instructions of programs; 15 seconds at worst. Counted,
not timed, so that an adapter is served or refused on every machine alike."""
_MAX_RE2_BYTES = 8 << 20


class Refused(ValueError):  # noqa: N818 - a reason that the caller puts into its own error
    """Why an expression is not taken."""


@cache
def _options() -> Any:
    import re2

    options = re2.Options()
    options.max_mem = _MAX_RE2_BYTES
    options.log_errors = False
    options.never_capture = True
    return options


class _Expressions:
    """Expressions that whole names must match, and the work that they may take."""

    def __init__(self) -> None:
        self._compiled: list[tuple[int, Any]] = []
        self._size = self._num_steps = 0

    def add(self, index: int, expression: str) -> None:
        import re2  # few adapters have expressions; the others need no RE2

        try:
            compiled = re2.compile(_in_re2(expression), _options())
        except re2.error as error:
            words = error.args[0]
            words = words.decode(errors="replace") if isinstance(words, bytes) else str(words)
            raise Refused(f"RE2 does not take ({words[:200]})") from error
        self._compiled.append((index, compiled))
        self._size += compiled.programsize

    def matches(self, name: str) -> set[int]:
        self._num_steps += len(name) * self._size
        if self._num_steps > _MAX_STEPS:
            raise Refused("takes too long to match with all modules of the file")
        return {index for index, compiled in self._compiled if compiled.fullmatch(name)}


def _in_re2(expression: str) -> str:
    """With RE2's own signs for what Python writes otherwise: the end, and counts from zero."""

    def own(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"{{0,{found[1]}}}"
        return r"\z" if found[0] == r"\Z" else found[0]

    return re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{,(\d+)\}", own, expression)


def _check_python(expression: str) -> None:
    """PEFT matches with `re`; what that refuses is no expression at all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sets that Python may read otherwise one day
            re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"is not a regular expression ({error})") from error


class Patterns(Generic[Value]):
    """Values that override a default for some modules."""

    def __init__(self, field: str, values: Mapping[str, Value]) -> None:
        self._field = field
        self._values: dict[str, Value] = dict(values)
        self._in_order: list[Value] = list(self._values.values())
        self._plain, self._anchored = _PlainKeys(), _PlainKeys()
        self._expressions = _Expressions()
        self._used: set[int] = set()
        for index, key in enumerate(values):
            if not _PLAIN.fullmatch(key):
                self._add_expression(index, key)
            elif key.startswith("^"):
                self._anchored.add(key[1:], index)
            else:
                self._plain.add(key, index)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[str, Value]]:
        """In the order that decides which key counts."""
        return iter(self._values.items())

    def find(self, module: str) -> Value | None:
        """The value of the first key that matches the module's name."""
        if not self._in_order:
            return None
        found = self._matching(module)
        self._used |= found
        return self._in_order[min(found)] if found else None

    def refuse_unused(self, modules: Iterable[str]) -> None:
        """Refuse keys that matched no module yet, and match none of these."""
        left = set(range(len(self._in_order))) - self._used
        for module in modules if left else ():
            left -= self._matching(module)
            if not left:
                return
        if left:
            keys = [repr(key[:200]) for index, key in enumerate(self._values) if index in left]
            rest = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
            raise AdapterError(
                f"{self._field} has {', '.join(keys[:_MAX_NAMED])}{rest}, which matches no module "
                "of this model; a key is a regular expression for the end of a module's name, from "
                "a dot on. Correct or remove it."
            )

    def _matching(self, module: str) -> set[int]:
        found = set(self._anchored.matching(module))
        for end in endings(module):
            found.update(self._plain.matching(end))
        try:
            self._plain.check()
            self._anchored.check()
            found |= self._expressions.matches(module)
        except Refused as reason:
            raise AdapterError(f"{self._field} {reason}; name the modules plainly.") from reason
        return found

    def _add_expression(self, index: int, key: str) -> None:
        try:
            if len(key) > _MAX_KEY_CHARS:
                raise Refused(f"has more than {_MAX_KEY_CHARS} characters")
            _check_python(rf"(.*\.)?({key})$")
            _check_python(key)  # by itself, too: it must not close a bracket around it
            self._expressions.add(index, rf"(?:.*\.)?(?:{key})")
        except Refused as reason:
            raise AdapterError(
                f"{self._field} has the key {key[:200]!r}, which {reason}; name the modules "
                "plainly."
            ) from reason


class WholeName:
    """An expression that a module's whole name must match, as PEFT's `target_modules` and
    `exclude_modules` are where they are strings."""

    def __init__(self, field: str, expression: str) -> None:
        self._field = field
        self._expressions = _Expressions()
        self.can_match = True
        """Whether it can be told in bounded time what matches: not with look-around and the like,
        which are valid in PEFT."""
        if len(expression) > _MAX_KEY_CHARS:
            self.can_match = False
            return
        try:
            _check_python(expression)
        except Refused as reason:
            raise AdapterError(
                f"{field} is {expression[:200]!r}, which {reason}. Correct it, or list the "
                "modules' names."
            ) from reason
        try:
            self._expressions.add(0, expression)
        except Refused:
            self.can_match = False

    def matches(self, module: str) -> bool:
        try:
            return bool(self._expressions.matches(module))
        except Refused as reason:
            raise AdapterError(f"{self._field} {reason}; list the modules' names.") from reason


class _PlainKeys:
    """Keys without any sign but dots, each of which stands for any character.

    Kept by where their dots are: a name with dots in those places, too, is the key or is not. Keys
    of one length have few such shapes, because modules of a model are called alike.
    """

    def __init__(self) -> None:
        self._shapes: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._num_lookups = 0

    def add(self, key: str, index: int) -> None:
        dots = tuple(at for at, character in enumerate(key) if character == ".")
        self._shapes.setdefault(len(key), {}).setdefault(dots, {})[key] = index

    def matching(self, name: str) -> Iterator[int]:
        shapes = self._shapes.get(len(name))
        if shapes is None:
            return
        self._num_lookups += len(shapes)
        for dots, keys in shapes.items():
            characters = list(name)
            for at in dots:
                characters[at] = "."
            index = keys.get("".join(characters))
            if index is not None:
                yield index

    def check(self) -> None:
        if self._num_lookups > _MAX_LOOKUPS:
            raise Refused("takes too long to match with all modules of the file")


def endings(module: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    yield module
    position = module.find(".")
    while position != -1:
        yield module[position + 1 :]
        position = module.find(".", position + 1)
