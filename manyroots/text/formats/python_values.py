"""Values and calls in Python's spelling, as models write them: f(city='Oslo', days=[1, None]).

Takes text; gives plain values. More lenient than Python: strings may have line breaks in them,
numbers may have leading zeros, JSON's words count, and a dict without values is a list. Where
`is_loose`, quotes of a string may stand unescaped inside of it, and what is no value is its text.
"""

from __future__ import annotations

import math
import re
from typing import Any

NAME = r"[^\s\"'<>{}()\[\]=,\\|]{1,256}"
"""A tool's name, as `tools.py` allows them."""
_CALL = re.compile(rf"({NAME})\(")
_KEY = re.compile(rf"({NAME})\s*=(?!=)\s*")
_WORDS = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_WORD = re.compile(r"(True|False|None|true|false|null)(?![\w.])")
_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|(\d[\d_]*)?\.?\d[\d_]*\.?([eE][+-]?\d+)?)(?![\w.])")
_QUOTE = re.compile(r"([rRbBuUfF]{0,2})(\"\"\"|'''|\"|')")
_ENDS = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'", '"' * 3, "'" * 3)}
"""A quote, or what is escaped and so none."""
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(
    r"\\(\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")
_LETTERS = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n",
    "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_MAX_DEPTH = 60
_ARGUMENT_ENDS = re.compile(
    rf"\s*(\Z|,\s*{NAME}\s*=(?!=)|\)\s*(\Z|\]\s*(\Z|\n|[A-Z<])|,\s*{NAME}\(|\n\s*{NAME}\())"
)
_ITEM_ENDS = re.compile(r"\s*(\Z|:|,\s*([\"'\[{(\d+-]|[tTfFnN])|[\])}]\s*(\Z|[,\])}]))")
"""What may follow a string that is an argument, and one inside of a list or a dict."""


class NotPythonError(Exception):
    """The text is something else."""


def read_value(text: str) -> Any:
    """All of the text as one value. Raises NotPythonError."""
    source = _Source(text, 0, is_loose=False)
    value = source.value(0)
    source.skip_space()
    if source.place != len(text):
        raise NotPythonError
    return value


def read_call(
    text: str, place: int = 0, *, is_loose: bool = False
) -> tuple[str, dict[str, Any], int]:
    """The call at a place: its name, its arguments and where it ends. Raises NotPythonError."""
    source = _Source(text, place, is_loose)
    name = source.match(_CALL)
    if name is None:
        raise NotPythonError
    return name[1], source.arguments(), source.place


class _Source:
    def __init__(self, text: str, place: int, is_loose: bool) -> None:
        self.place = place
        self._text = text
        self._is_loose = is_loose

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self.place)
        if found is not None:
            self.place = found.end()
        return found

    def skip_space(self) -> None:
        self.match(_SPACE)

    def _takes(self, character: str) -> bool:
        self.skip_space()
        if self._text.startswith(character, self.place):
            self.place += 1
            return True
        return False

    def arguments(self) -> dict[str, Any]:
        """Up to the bracket that closes the call."""
        found: dict[str, Any] = {}
        while not self._takes(")"):
            key = self.match(_KEY)
            if key is None:
                raise NotPythonError
            found[key[1]] = self._argument()
            if not self._takes(",") and not self._text.startswith(")", self.place):
                raise NotPythonError
        return found

    def _argument(self) -> Any:
        begin = self.place
        try:
            value = self.value(0)
            self.skip_space()
            if self._text[self.place : self.place + 1] in (",", ")"):
                return value
        except NotPythonError:
            pass
        if not self._is_loose:
            raise NotPythonError
        self.place = begin
        return self._raw()

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise NotPythonError
        self.skip_space()
        if _QUOTE.match(self._text, self.place):
            return self._strings(depth)
        if self._takes("["):
            return self._items("]", depth)
        if self._takes("{"):
            return self._pairs(depth)
        if self._takes("("):
            return self._tuple(depth)
        if found := self.match(_WORD):
            return _WORDS[found[1]]
        if found := self.match(_NUMBER):
            return _number(found[0])
        raise NotPythonError

    def _items(self, end: str, depth: int) -> list[Any]:
        items = []
        while not self._takes(end):
            items.append(self.value(depth + 1))
            if not self._takes(",") and not self._text.startswith(end, self.place):
                raise NotPythonError
        return items

    def _tuple(self, depth: int) -> Any:
        begin = self.place
        items = self._items(")", depth)
        is_one = len(items) == 1 and not self._text[begin : self.place - 1].rstrip().endswith(",")
        return items[0] if is_one else items

    def _pairs(self, depth: int) -> Any:
        """A dict, or a set, which becomes a list."""
        found: dict[str, Any] = {}
        items: list[Any] = []
        while not self._takes("}"):
            key = self.value(depth + 1)
            if self._takes(":"):
                found[_key(key)] = self.value(depth + 1)
            else:
                items.append(key)
            if not self._takes(",") and not self._text.startswith("}", self.place):
                raise NotPythonError
        if items and found:
            raise NotPythonError
        return items or found

    def _strings(self, depth: int) -> str:
        """A string, or several in a row, which are one."""
        text = self._string(depth)
        while not self._is_loose:
            place = self.place
            self.skip_space()
            if not _QUOTE.match(self._text, self.place):
                self.place = place
                break
            text += self._string(depth)
        return text

    def _string(self, depth: int) -> str:
        opened = self.match(_QUOTE)
        assert opened is not None
        prefix, quote = opened[1], opened[2]
        follows = _ITEM_ENDS if depth else _ARGUMENT_ENDS
        begin = self.place
        for found in _ENDS[quote].finditer(self._text, begin):
            if found[0] != quote:
                continue
            if not self._is_loose or follows.match(self._text, found.end()):
                self.place = found.end()
                body = self._text[begin : found.start()]
                return body if "r" in prefix.lower() else unescaped(body)
        raise NotPythonError

    def _raw(self) -> str:
        """Text up to the comma or bracket that ends an argument."""
        begin, depth, quote = self.place, 0, ""
        for place in range(begin, len(self._text)):
            character = self._text[place]
            if quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}" and depth:
                depth -= 1
            elif character in ",)" and not depth:
                self.place = place
                return self._text[begin:place].strip()
        raise NotPythonError


def unescaped(body: str) -> str:
    """What a string's text means, pairs of surrogates as the characters that they stand for."""
    text = _ESCAPE.sub(_letter, body) if "\\" in body else body
    if _LONE.search(text):
        text = _SURROGATES.sub(_joined, text)
        text = _LONE.sub("\ufffd", text)
    return text


def _letter(found: re.Match[str]) -> str:
    code = found[1]
    if code in _LETTERS:
        return _LETTERS[code]
    number = int(code, 8) if code[0] in "01234567" else int(code[1:], 16)
    return chr(number) if number <= 0x10FFFF else found[0]


def _joined(found: re.Match[str]) -> str:
    return found[0].encode("utf-16", "surrogatepass").decode("utf-16")


def _key(value: Any) -> str:
    if isinstance(value, list | dict):
        raise NotPythonError
    return str(value)


def _number(word: str) -> int | float:
    plain = word.replace("_", "")
    try:
        if plain.lower().lstrip("+-").startswith("0x"):
            return int(plain, 16)
        if any(letter in plain for letter in ".eE"):
            number = float(plain)
            if math.isfinite(number):
                return number
            raise NotPythonError
        return int(plain)
    except ValueError:
        raise NotPythonError from None
