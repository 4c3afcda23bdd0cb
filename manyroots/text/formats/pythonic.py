"""Calls written as Python: [get_weather(city="Oslo"), now()].

A format: reads text, tells calls and content. The list is the whole answer, or stands between
marks. A call is told when it is whole. A list that holds anything else is content.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Generator
from typing import Any

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.call_grammars import listed, repeated, schema_rule
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import ToolUse

_NAMES = {"true": True, "false": False, "null": None}
"""JSON's words, which some models write here."""


_MARK = "__argument"
_STRING = r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_KEYWORD = re.compile(rf"{_STRING}|\b({'|'.join(keyword.kwlist)})(?=\s*=)", re.DOTALL)
"""A string, or an argument whose name Python has for itself."""


def _marked(found: re.Match[str]) -> str:
    return found[1] or found[2] + _MARK


def parse_pythonic(begin: str | None = None, end: str | None = None) -> Parse:
    """`begin`, `end`: marks around the list; where there are none the list is the whole answer."""

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        if begin is None:
            space = yield from reader.skip_space()
            if (yield from reader.peek()) == "[":
                yield from _list(reader, writer, None)
            else:
                writer.content(space)
            yield from reader.rest(writer.content)
            return
        while (yield from reader.until(begin, to=writer.content)):
            yield from reader.skip_space()
            yield from _list(reader, writer, end)

    return parse


def _list(reader: Reader, writer: AnswerWriter, end: str | None) -> Wait:
    """A list of calls, up to its mark."""
    text = ""
    has_call = False
    if (yield from reader.peek()) == "[":
        text += yield from reader.next()
    while True:
        text += yield from reader.skip_space()
        character = yield from reader.peek()
        if character in ("]", ",") and character:
            text += yield from reader.next()
            if character == "]":
                break
            continue
        spelled = yield from _one_call(reader)
        text += spelled
        called = _read(spelled)
        if called is None:
            if not has_call:  # not even one: then it was none
                writer.content(text)
            break
        has_call = True
        writer.call(called[0])
        writer.arguments(json.dumps(called[1], ensure_ascii=False))
    if end is not None:
        yield from reader.skip_space()
        yield from reader.begins(end)


def _one_call(reader: Reader) -> Generator[None, None, str]:
    """Text up to the bracket that closes a call, or to the end of what may be one."""
    text, depth, quote = "", 0, ""
    while character := (yield from reader.peek()):
        if not quote and depth == 0 and character in ",]":
            break
        text += character
        reader.skip()
        if quote:
            if character == "\\":
                text += yield from reader.next()
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                break
    return text


def _read(text: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and arguments; None for what is no call."""
    try:
        call = ast.parse(_KEYWORD.sub(_marked, text.strip()), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {
            word.arg.removesuffix(_MARK): _value(word.value) for word in call.keywords if word.arg
        }
        return ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        return None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_value(key)): _value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    return value


def pythonic_grammar(use: ToolUse, mark: Mark, begin: str = "", end: str = "") -> str:
    """A list of calls, and nothing else. Arguments come in the order of the schema."""
    around = [mark(text) if text else "" for text in (begin, end)]
    calls = repeated(use, "call", f"{json.dumps(', ')} call")
    rules = [f"start: {around[0]} {json.dumps('[')} {calls} {json.dumps(']')} {around[1]}"]
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
