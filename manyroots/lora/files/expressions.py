"""Regular expressions from a file that may come from anybody, as trees for `automaton.py`.

The language is Python's, with which PEFT matches. What no automaton can do (look-around,
back-references, flags, possessive repeats) is refused.
"""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CLASS_ESCAPES = "dDwWsS"


class Refused(ValueError):  # noqa: N818 - a reason that the caller puts into its own error
    """Why an expression is not taken."""


class Single(NamedTuple):
    """One character, as `re` reads it: a literal, an escape or a set."""

    source: str


class Start(NamedTuple):
    """`^`: nothing, at the beginning of the name."""


class End(NamedTuple):
    """`$`: nothing, at its end."""


class Concatenation(NamedTuple):
    parts: tuple[PatternNode, ...]


class Choice(NamedTuple):
    options: tuple[PatternNode, ...]


class Repeat(NamedTuple):
    part: PatternNode
    least: int
    most: int | None


PatternNode = Single | Start | End | Concatenation | Choice | Repeat


def parse(key: str) -> PatternNode:
    """What PEFT's `(.*\\.)?(KEY)$` has in the place of KEY."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sets that Python may read otherwise one day
            re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"is not a regular expression ({error})") from error
    return _Parser(key).whole()


class _Parser:
    """Reads what `re` has found valid, so that it need not look for mistakes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> PatternNode:
        node = self._choice()
        if self._at < len(self._text):  # valid only between PEFT's own brackets
            raise Refused("closes a bracket that it has not opened")
        return node

    def _choice(self) -> PatternNode:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> PatternNode:
        parts: list[PatternNode] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeats(self._one()))
        return Concatenation(tuple(parts))

    def _one(self) -> PatternNode:
        start = self._at
        character = self._next()
        if character == "^":
            return Start()
        if character == "$":
            return End()
        if character == "(":
            return self._group()
        if character == "\\":
            return self._escape()
        if character == "[":
            self._takes("^")
            self._takes("]")  # the first is a member
            while self._next() != "]":
                if self._text[self._at - 1] == "\\":
                    self._next()
            return Single(self._text[start : self._at])
        return Single("." if character == "." else re.escape(character))

    def _group(self) -> PatternNode:
        if self._takes("?"):
            if self._takes("P<"):
                self._at = self._text.index(">", self._at) + 1
            elif not self._takes(":"):
                raise Refused("uses look-around, flags or back-references")
        node = self._choice()
        if not self._takes(")"):
            raise Refused("opens a bracket that it does not close")
        return node

    def _escape(self) -> PatternNode:
        character = self._next()
        if character == "A":
            return Start()
        if character == "Z":
            return End()
        if character.isalnum() and character not in _CLASS_ESCAPES:
            raise Refused(f"uses \\{character}")
        return Single(f"\\{character}")

    def _repeats(self, part: PatternNode) -> PatternNode:
        least: int
        most: int | None
        count = _COUNT.match(self._text, self._at)
        if self._takes("*"):
            least, most = 0, None
        elif self._takes("+"):
            least, most = 1, None
        elif self._takes("?"):
            least, most = 0, 1
        elif count is not None and count.group() != "{}":
            self._at = count.end()
            low, comma, high = count.groups()
            least = int(low or 0)
            most = (int(high) if high else None) if comma else least
        else:
            return part
        if self._takes("+"):
            raise Refused("has a possessive repeat")
        self._takes("?")  # fewest first or most first: the same names match
        return Repeat(part, least, most)

    def _next(self) -> str:
        character = self._text[self._at]
        self._at += 1
        return character

    def _takes(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True
