"""Calls written as Python: [get_weather(city="Oslo"), now()].

Formats: read text, tell calls and content. The list stands between marks, or anywhere in the answer
if it calls tools of the request. A call is told when it is whole. One that even lenient Python
can't read is read once more, loosely, up to the end of the list; what then is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.call_grammars import listed, repeated, schema_rule
from manyroots.text.formats.json_calls import NotACallError
from manyroots.text.formats.json_calls import read_call as read_json_call
from manyroots.text.formats.python_values import NAME, NotPythonError, read_call
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

_LIST = re.compile(rf"\[\s*({NAME})?(\()?")
_CALL = re.compile(rf"(?<![\w.]){NAME}\(")
_LAYOUT = tuple("[],;")
_MAX_FAILED = 64
"""Places at which a call is looked for in vain: each may read the text to its end."""


@dataclass(frozen=True, slots=True)
class PythonicMarks:
    """What stands around calls."""

    begin: str
    end: str
    is_list: bool = True
    """There are brackets around the calls and commas between them; else line breaks."""


LFM2_MARKS = PythonicMarks("<|tool_call_start|>", "<|tool_call_end|>")
OLMO_MARKS = PythonicMarks("<function_calls>", "</function_calls>", is_list=False)


def parse_marked_python(marks: PythonicMarks) -> Parse:
    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while mark := (yield from reader.until(marks.begin, marks.end, to=writer.content)):
            if mark == marks.end:
                continue  # of nothing
            body = yield from _marked(reader, writer, marks.end)
            # Some models say the same once more, and end it again.
            if body and (yield from reader.begins(body)):
                yield from reader.begins(marks.end)

    return parse


def _marked(reader: Reader, writer: AnswerWriter, end: str) -> Generator[None, None, str]:
    """Calls up to the mark that ends them; gives the text of those that were read at once."""
    body = ""
    while True:
        body += yield from reader.skip_space()
        if (yield from reader.begins(end)):
            return body
        character = yield from reader.peek()
        if character in _LAYOUT:
            reader.skip()
            body += character
        elif character == "{":
            try:
                yield from read_json_call(reader, writer)
            except NotACallError as error:
                writer.content(error.text)
            body = ""
        elif character:
            spelled = yield from _one_call(reader)
            called = _strict(spelled)
            if called is None:
                reader.unread(spelled)
                rest, _ = yield from reader.collect(end)
                _tell_loosely(writer, rest)
                return ""
            _tell(writer, *called)
            body += spelled
        else:
            return ""


def parse_pythonic(offered: Collection[str]) -> Parse:
    """`offered`: the tools that a list after other text must call."""

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        space = yield from reader.skip_space()
        writer.content(space)
        is_first = True
        while True:
            text, mark = "", None
            if not is_first or (yield from reader.peek()) != "[":
                mark = yield from reader.until("[", to=writer.content)
                if mark is None:
                    return
                reader.unread("[")
            text, name = yield from _list_begins(reader)
            if name in offered or (name and is_first and mark is None):
                reader.unread(text[1:])
                yield from _list(reader, writer, offered)
            else:
                writer.content(text)
            is_first = False

    return parse


def _list_begins(reader: Reader) -> Generator[None, None, tuple[str, str]]:
    """A bracket and what may be a call's name after it; the name is "" where there is none."""
    text = ""
    while True:
        found = _LIST.fullmatch(text)
        if text and (found is None or found[2]):
            break
        character = yield from reader.next()
        if not character:
            break
        text += character
    return text, (found[1] or "") if found is not None and found[2] else ""


def _list(reader: Reader, writer: AnswerWriter, offered: Collection[str]) -> Wait:
    """A list of calls without marks, after its opening bracket."""
    has_call, text = False, "["
    while True:
        space = yield from reader.skip_space()
        character = yield from reader.peek()
        if character in ("]", ","):
            reader.skip()
            if character == "]":
                return
            text += space + character
            continue
        spelled = yield from _one_call(reader)
        called = _strict(spelled)
        if called is not None:
            _tell(writer, *called)
            has_call = True
            continue
        if not has_call and spelled.partition("(")[0].strip() not in offered:
            writer.content(text + space + spelled)
            return
        reader.unread(spelled)
        rest: list[str] = []
        yield from reader.rest(rest.append)
        _tell_loosely(writer, "".join(rest), "" if has_call else text + space)
        return


def _one_call(reader: Reader) -> Generator[None, None, str]:
    """Text up to the bracket that closes a call, or to the end of what may be one."""
    text, depth, quote, begin = "", 0, "", 0
    while character := (yield from reader.peek()):
        if not quote and depth == 0 and character in ",]":
            break
        text += character
        reader.skip()
        if quote:
            if character == "\\":
                text += yield from reader.next()
            elif len(text) >= begin + len(quote) and text.endswith(quote):
                quote = ""
        elif character in "\"'":
            quote = character
            if (yield from reader.begins(character * 2)):
                quote = character * 3
            elif (yield from reader.begins(character)):
                quote = ""  # and that was all of it
                text += character
            text += quote[1:]
            begin = len(text)
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                break
    return text


def _strict(text: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and arguments; None for what is no call."""
    text = text.strip()
    try:
        name, arguments, end = read_call(text)
    except NotPythonError:
        return None
    return (name, arguments) if end == len(text) else None


def _tell(writer: AnswerWriter, name: str, arguments: dict[str, Any]) -> None:
    writer.call(name)
    writer.arguments(json.dumps(arguments, ensure_ascii=False))


def _tell_loosely(writer: AnswerWriter, text: str, before: str = "") -> None:
    """All calls that there are in a text, and the rest as content. `before`: content if there is no
    call."""
    place = told = num_failed = 0
    has_call = False
    while num_failed < _MAX_FAILED and (found := _CALL.search(text, place)):
        try:
            name, arguments, place = read_call(text, found.start(), is_loose=True)
        except NotPythonError:
            place = found.end()
            num_failed += 1
            continue
        writer.content(text[told : found.start()].strip().lstrip("[],;"))
        _tell(writer, name, arguments)
        has_call, told = True, place
    rest = text[told:]
    writer.content(rest.lstrip("[],; \n") if has_call else before + rest)


def pythonic_grammar(use: ToolUse, mark: Mark, marks: PythonicMarks | None = None) -> str:
    """A list of calls, and nothing else. Arguments come in the order of the schema."""
    around = ("", "") if marks is None else (mark(marks.begin), mark(marks.end))
    is_list = marks is None or marks.is_list
    calls = repeated(use, "call", f"{json.dumps(', ' if is_list else chr(10))} call")
    if is_list:
        calls = f"{json.dumps('[')} {calls} {json.dumps(']')}"
    rules = [f"start: {around[0]} {calls} {around[1]}"]
    names = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        names.append(f"{json.dumps(tool.name + '(')} {name} {json.dumps(')')}")
        rules += listed(
            tool,
            name,
            lambda key, schema, tool=tool: (  # type: ignore[misc]
                f"{json.dumps(key + '=')} {schema_rule(schema, tool.parameters)}"
            ),
        )
    return "\n".join([*rules, f"call: {' | '.join(names)}"])


PYTHONIC = ToolFormat(
    "pythonic",
    lambda use: parse_pythonic(use.names),
    pythonic_grammar,
    told_by=(("[func_name1(",),),
    aliases=("llama4_pythonic",),
)
LFM2 = ToolFormat(
    "lfm2",
    lambda use: parse_marked_python(LFM2_MARKS),
    lambda use, mark: pythonic_grammar(use, mark, LFM2_MARKS),
    told_by=((LFM2_MARKS.begin,),),
    begins=(LFM2_MARKS.begin,),
    special_tokens=(LFM2_MARKS.begin, LFM2_MARKS.end),
)
OLMO_3 = ToolFormat(
    "olmo3",
    lambda use: parse_marked_python(OLMO_MARKS),
    lambda use, mark: pythonic_grammar(use, mark, OLMO_MARKS),
    told_by=((OLMO_MARKS.begin,),),
    begins=(OLMO_MARKS.begin,),
    special_tokens=(OLMO_MARKS.begin, OLMO_MARKS.end),
)
