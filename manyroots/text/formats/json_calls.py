"""Calls that are written as JSON objects: {"name": ..., "arguments": {...}}.

Reads one from a `Reader`, telling the writer the name as soon as it is known and the arguments as
they come, in the model's own spelling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.reader import Reader, Wait

_ARGUMENTS = ("arguments", "parameters", "args")


class NotACallError(Exception):
    """The text is something else; `text` is what was read of it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read_call(reader: Reader, writer: AnswerWriter) -> Wait:
    """Read one object, which the text must go on with. Raises NotACallError if it is no call; once
    the name is told, whatever follows is part of it."""
    call = _Call(reader, writer)
    try:
        yield from call.read()
    except _BrokenError:
        if not call.is_named:
            raise NotACallError("".join(call.text)) from None
    if not call.is_named:
        raise NotACallError("".join(call.text))


class _BrokenError(Exception):
    """Not JSON, or over too early."""


class _Call:
    def __init__(self, reader: Reader, writer: AnswerWriter) -> None:
        self.text: list[str] = []
        """All that was read."""
        self.is_named = False
        self._reader = reader
        self._writer = writer
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._has_arguments = False

    def read(self) -> Wait:
        yield from self._expect("{")
        while True:
            yield from self._space()
            character = yield from self._reader.peek()
            if character == "}":
                yield from self._expect("}")
                break
            if character == ",":
                yield from self._expect(",")
                continue
            yield from self._member()
        if self.is_named and not self._has_arguments:
            self._writer.arguments("{}")

    def _member(self) -> Wait:
        key = yield from self._string()
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        first = yield from self._reader.peek()
        if key == "name" and first == '"' and not self.is_named:
            name = yield from self._string()
            self._tell_name(name)
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if first == '"':  # JSON in a string, as OpenAI's clients write it
                self._tell_arguments((yield from self._string()))
            elif first == "n":
                yield from copy_value(self._reader, self.text.append)
                self._tell_arguments("{}")
            else:
                yield from copy_value(self._reader, self._copy_arguments)
        else:
            yield from copy_value(self._reader, self.text.append)

    def _tell_name(self, name: str) -> None:
        self.is_named = True
        self._writer.call(name)
        self._writer.arguments("".join(self._early))

    def _copy_arguments(self, text: str) -> None:
        self.text.append(text)
        self._tell_arguments(text)

    def _tell_arguments(self, text: str) -> None:
        if self.is_named:
            self._writer.arguments(text)
        else:
            self._early.append(text)

    def _string(self) -> Generator[None, None, str]:
        parts: list[str] = []
        if (yield from self._reader.peek()) != '"':
            raise _BrokenError
        yield from copy_value(self._reader, parts.append)
        text = "".join(parts)
        self.text.append(text)
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            raise _BrokenError from None
        return str(value)

    def _space(self) -> Wait:
        while (character := (yield from self._reader.peek())).isspace():
            self.text.append(character)
            self._reader.skip()

    def _expect(self, character: str) -> Wait:
        if (yield from self._reader.peek()) != character:
            raise _BrokenError
        self.text.append(character)
        self._reader.skip()


def copy_value(reader: Reader, to: Callable[[str], None]) -> Wait:
    """Hand on one JSON value as it is written, as it comes; at the end of the text what there is.
    A number or a word ends before what can't be part of it."""
    depth = 0
    in_string = is_escaped = False
    part: list[str] = []
    while character := (yield from _peek_or_flush(reader, part, to)):
        is_done = False
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
            is_done = not in_string and depth == 0
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
        elif depth == 0 and (character in ",:}]" or character.isspace()):
            break
        elif character in "}]":
            depth -= 1
            is_done = depth == 0
        part.append(character)
        reader.skip()
        if is_done:
            break
    if part:
        to("".join(part))


def _peek_or_flush(
    reader: Reader, part: list[str], to: Callable[[str], None]
) -> Generator[None, None, str]:
    """The next character; before a pause, what was read goes out."""
    peeking = reader.peek()
    while True:
        try:
            next(peeking)
        except StopIteration as ended:
            return str(ended.value)
        if part:
            to("".join(part))
            part.clear()
        yield
