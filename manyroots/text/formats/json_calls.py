"""Calls that are written as JSON objects: {"name": ..., "arguments": {...}}.

Reads them from a `Reader`, telling the writer the name as soon as it is known and the arguments as
they come, in the model's own spelling. Where calls have no mark, an object is a call only if it
names a tool that the request offers, and has arguments or says nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.reader import Reader, Wait

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_OF_CALLS = {*_NAMES, *_ARGUMENTS, "type", "id", "description"}
"""Keys that objects have which are calls."""
_BESIDE_NAMES = {"type", "id"}
"""Keys that say nothing of a tool but which call it is."""
_BETWEEN = tuple(" \n\t\r;,")
"""What stands between calls."""
_FENCE, _FENCE_END = "```json", "```"


class NotACallError(Exception):
    """The text is something else; `text` is what was read of it."""

    def __init__(self, text: str, is_open: bool) -> None:
        """`is_open`: the text ends inside of an object, which goes on as JSON."""
        super().__init__(text)
        self.text = text
        self.is_open = is_open


def read_call(reader: Reader, writer: AnswerWriter, offered: Collection[str] | None = None) -> Wait:
    """Read one object, which the text must go on with. Raises NotACallError if it is no call; once
    the name is told, whatever follows is part of it. `offered`: names that a call must have one of,
    with arguments; None takes every object with a name."""
    call = _Call(reader, writer, offered)
    try:
        yield from call.read()
    except _BrokenError:
        if not call.is_told:
            raise NotACallError("".join(call.text), is_open=False) from None
    except _OtherError:
        raise NotACallError("".join(call.text), is_open=True) from None
    if not call.is_told:
        raise NotACallError("".join(call.text), is_open=False)


def read_list(reader: Reader, writer: AnswerWriter) -> Generator[None, None, tuple[bool, str]]:
    """Read calls after a mark, in brackets or without. Gives whether there was one, and the text
    that was read and is none."""
    has_call, is_listed = False, False
    text = yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        is_listed = True
        text += yield from reader.next()
    while True:
        text += yield from reader.skip_space()
        character = yield from reader.peek()
        if character == "{":
            try:
                yield from read_call(reader, writer)
            except NotACallError as error:
                return has_call, text + error.text
            has_call, text = True, ""
        elif character and character in ",;" and has_call:
            reader.skip()
        elif character == "]" and is_listed:
            reader.skip()
            return has_call, "" if has_call else text + "]"
        else:
            return has_call, text


def parse_marked(begins: tuple[str, ...], ends: tuple[str, ...]) -> Parse:
    """The format of calls after one of `begins`, with one of `ends` after them or without. What
    stands there and is no call is content, marks included."""

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        mark = yield from reader.until(*begins, to=writer.content)
        while mark is not None:
            has_call, text = yield from read_list(reader, writer)
            if not has_call:
                writer.content(mark + text)
                mark = yield from reader.until(*begins, to=writer.content)
                continue
            # Most calls end here. A bracket too many is dropped, and all else is content.
            more, mark = yield from reader.collect(*begins, *ends)
            writer.content((text + more).lstrip("]} \n").rstrip())
            if mark is None or mark in ends:
                mark = yield from reader.until(*begins, to=writer.content)

    return parse


def parse_unmarked(
    offered: Collection[str],
    *,
    hidden: tuple[str, ...] = (),
    shown: tuple[str, ...] = (),
    ends: tuple[str, ...] = (),
) -> Parse:
    """The format of calls that stand anywhere in the answer, alone or in a list, in a fence or
    without. `hidden`, `shown`: marks before them, and whether these are content where no call
    follows. `ends`: marks after them."""
    marks = (*hidden, *shown, _FENCE, "{", "[")

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while mark := (yield from reader.until(*marks, to=writer.content)):
            before = ""
            while mark in hidden or mark in shown or mark == _FENCE:
                before += "" if mark in hidden else mark
                before += yield from reader.skip_space()
                mark = yield from _next_of(reader, marks)
            if mark == "[":
                before += "[" + (yield from reader.skip_space())
                mark = yield from _next_of(reader, ("{",))
            if mark != "{":
                writer.content(before)
                continue
            reader.unread("{")
            yield from _calls(reader, writer, before)

    def _calls(reader: Reader, writer: AnswerWriter, before: str) -> Wait:
        closing = ("]",) if "[" in before else ()
        closing_marks = (*ends, _FENCE_END) if _FENCE in before else ends
        while (yield from reader.peek()) == "{":
            try:
                yield from read_call(reader, writer, offered)
            except NotACallError as error:
                writer.content(before + error.text)
                if error.is_open:  # objects in an answer's JSON are no calls either
                    yield from copy_value(reader, writer.content, depth=1)
                return
            before = ""
            while (yield from reader.peek()) in _BETWEEN:
                reader.skip()
            yield from _next_of(reader, (*hidden, *closing))
            yield from reader.skip_space()
            yield from _next_of(reader, closing_marks)
            yield from reader.skip_space()

    return parse


def _next_of(reader: Reader, marks: tuple[str, ...]) -> Generator[None, None, str]:
    """Take the mark that comes next; "" if none does."""
    for mark in marks:
        if (yield from reader.begins(mark)):
            return mark
    return ""


class _BrokenError(Exception):
    """Not JSON, or over too early."""


class _OtherError(Exception):
    """JSON that is no call."""


class _Call:
    def __init__(
        self, reader: Reader, writer: AnswerWriter, offered: Collection[str] | None
    ) -> None:
        self.text: list[str] = []
        """All that was read."""
        self.is_told = False
        self._reader = reader
        self._writer = writer
        self._offered = offered
        self._name: str | None = None
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._has_arguments = self._has_more = False
        self._is_in_string = self._is_escaped = False
        """Where the arguments are that were told last."""

    def read(self) -> Wait:
        yield from self._object()
        self._tell_name(is_whole=True)
        if self.is_told and not self._has_arguments:
            self._writer.arguments("{}")

    def _object(self) -> Wait:
        yield from self._expect("{")
        while True:
            yield from self._space()
            character = yield from self._reader.peek()
            if character == "}":
                yield from self._expect("}")
                return
            if character == ",":
                yield from self._expect(",")
                continue
            yield from self._member()

    def _member(self) -> Wait:
        key = yield from self._string()
        if self._offered is not None and not self.is_told and key not in _OF_CALLS:
            raise _OtherError
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        first = yield from self._reader.peek()
        if key in _NAMES and first == '"' and self._name is None:
            name = yield from self._string()
            if self._offered is not None and name not in self._offered:
                raise _OtherError
            self._name = name
            self._tell_name()
        elif key == "function" and first == "{" and self._name is None:
            yield from self._object()  # as OpenAI's API writes calls
        elif key in _ARGUMENTS and not self._has_arguments:
            yield from self._arguments(first)
        else:
            self._has_more = self._has_more or key not in _BESIDE_NAMES
            yield from copy_value(self._reader, self.text.append)

    def _arguments(self, first: str) -> Wait:
        if self._offered is not None and first not in ("{", '"', "n"):
            raise _BrokenError
        self._has_arguments = True
        self._tell_name()
        if first == '"':  # JSON in a string, as OpenAI's clients write it
            self._tell_arguments((yield from self._string()) or "{}")
        elif first == "n":
            yield from copy_value(self._reader, self.text.append)
            self._tell_arguments("{}")
        else:
            yield from copy_value(self._reader, self._copy_arguments, is_closed=True)

    def _tell_name(self, *, is_whole: bool = False) -> None:
        """Where not every object is a call, when its arguments have begun, or at its end."""
        is_bare = is_whole and not self._has_more
        is_sure = self._offered is None or self._has_arguments or is_bare
        if self._name is None or self.is_told or not is_sure:
            return
        self.is_told = True
        self._writer.call(self._name)
        for text in self._early:
            self._tell_arguments(text)

    def _copy_arguments(self, text: str) -> None:
        self.text.append(text)
        self._tell_arguments(text)

    def _tell_arguments(self, text: str) -> None:
        if self.is_told:
            self._writer.arguments(self._escaped(text))
        else:
            self._early.append(text)

    def _escaped(self, text: str) -> str:
        """Line breaks inside of strings as JSON wants them."""
        if not any(character < " " for character in text):
            for character in text:
                self._step(character)
            return text
        made = []
        for character in text:
            is_raw = self._is_in_string and character < " "
            made.append(json.dumps(character)[1:-1] if is_raw else character)
            self._step(character)
        return "".join(made)

    def _step(self, character: str) -> None:
        if self._is_in_string:
            self._is_in_string = self._is_escaped or character != '"'
            self._is_escaped = not self._is_escaped and character == "\\"
        else:
            self._is_in_string = character == '"'

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


def copy_value(
    reader: Reader, to: Callable[[str], None], *, depth: int = 0, is_closed: bool = False
) -> Wait:
    """Hand on one JSON value as it is written, as it comes; at the end of the text what there is.
    A number or a word ends before what can't be part of it. `depth`: so many objects are open
    already. `is_closed`: brackets that are missing before a mark, which JSON can't have there, are
    added."""
    open_brackets = "}" * depth
    in_string = is_escaped = False
    part: list[str] = []
    while character := (yield from _peek_or_flush(reader, part, to)):
        is_done = False
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
            is_done = not in_string and not open_brackets
        elif character == '"':
            in_string = True
        elif character in "{[":
            open_brackets += "}" if character == "{" else "]"
        elif not open_brackets and (character in ",:}]" or character.isspace()):
            break
        elif character in "}]":
            open_brackets = open_brackets[:-1]
            is_done = not open_brackets
        elif character == "<" and is_closed:
            part += reversed(open_brackets)
            break
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
