"""Calls as Gemma writes them: call:NAME{key:value,...} between marks, keys without quotes, strings
between marks of their own.

A format: reads text, tells calls and content; the arguments become JSON as they come. Gemma 4 and
FunctionGemma differ in their marks alone.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.argument_types import (
    as_json,
    find_tool,
    inside_text,
    is_text,
    property_schema,
)
from manyroots.text.formats.call_grammars import listed, repeated, schema_rule
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import Tool, ToolUse

_MAX_DEPTH = 60
_CALL = "call:"


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    begin: str
    end: str
    quote: str


GEMMA_4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")


def parse_gemma(marks: GemmaMarks, tools: Sequence[Tool]) -> Parse:
    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while (yield from reader.until(marks.begin, to=writer.content)):
            space = yield from reader.skip_space()
            if not (yield from reader.begins(_CALL)):
                writer.content(marks.begin + space)
                continue
            name, mark = yield from reader.collect("{", marks.end)
            if mark is None:
                writer.content(f"{marks.begin}{_CALL}{name}")
                return
            writer.call(name.strip())
            if mark == marks.end:
                writer.arguments("{}")
                continue
            arguments = _Arguments(reader, writer, marks, find_tool(tools, name.strip()))
            yield from arguments.read_object(0)
            yield from reader.skip_space()
            yield from reader.begins(marks.end)

    return parse


class _Arguments:
    """Copies Gemma's values as JSON."""

    def __init__(
        self, reader: Reader, writer: AnswerWriter, marks: GemmaMarks, tool: Tool | None
    ) -> None:
        self._reader = reader
        self._tell = writer.arguments
        self._marks = marks
        self._tool = tool

    def read_object(self, depth: int) -> Wait:
        """Behind its opening bracket."""
        before = "{"
        while True:
            yield from self._reader.skip_space()
            character = yield from self._reader.peek()
            if character == ",":
                self._reader.skip()
                continue
            if character in ("}", ""):
                if character:
                    self._reader.skip()
                    self._tell("{}" if before == "{" else "}")
                return
            key = yield from self._key()
            if key is None:
                return
            self._tell(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._value(depth, key if depth == 0 else None)

    def _key(self) -> Generator[None, None, str | None]:
        key, mark = yield from self._reader.collect(":", "}")
        if mark != ":":
            return None
        return key.strip().removeprefix(self._marks.quote).removesuffix(self._marks.quote)

    def _list(self, depth: int) -> Wait:
        before = "["
        while True:
            yield from self._reader.skip_space()
            character = yield from self._reader.peek()
            if character == ",":
                self._reader.skip()
                continue
            if character in ("]", ""):
                if character:
                    self._reader.skip()
                    self._tell("[]" if before == "[" else "]")
                return
            self._tell(before)
            before = ", "
            yield from self._value(depth, None)

    def _value(self, depth: int, argument: str | None) -> Wait:
        """`argument`: the name of one that the tool's schema may speak of."""
        yield from self._reader.skip_space()
        if (yield from self._reader.begins(self._marks.quote)):
            yield from self._text(argument)
            return
        character = yield from self._reader.peek()
        if character in ("{", "[") and depth < _MAX_DEPTH:
            self._reader.skip()
            if character == "{":
                yield from self.read_object(depth + 1)
            else:
                yield from self._list(depth + 1)
            return
        word = ""
        while (character := (yield from self._reader.peek())) and character not in ",}]":
            word += character
            self._reader.skip()
        self._tell(as_json(word.strip(), {"type": "any"}))

    def _text(self, argument: str | None) -> Wait:
        """Behind its opening quote. One that is meant to be a number is written like a string by
        some."""
        schema = {} if argument is None else property_schema(self._tool, argument)
        if is_text(schema):
            self._tell('"')
            ended = yield from self._reader.until(
                self._marks.quote, to=lambda text: self._tell(inside_text(text))
            )
            self._tell('"' if ended else "")
            return
        text, ended = yield from self._reader.collect(self._marks.quote)
        if ended:
            self._tell(as_json(text, schema))


def gemma_grammar(marks: GemmaMarks, use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else. Numbers, words and strings follow the schema's types; what is in
    lists and objects is of any kind."""
    quote = mark(marks.quote)
    is_special = not quote.startswith('"')
    rules = [
        f"start: {repeated(use, 'call', 'call')}",
        'value: text | SCALAR | "{" (pair ("," pair)*)? "}" | "[" (value ("," value)*)? "]"',
        'pair: /[A-Za-z_][A-Za-z0-9_]*/ ":" value',
        r"SCALAR: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,9})?|true|false|null/",
    ]
    if is_special:
        rules += [f"text: {quote} TEXT {quote}", r"TEXT: /(.|\n)*/"]
    else:
        rules += [f"text: {quote} rest", rf"rest[lazy]: /(.|\n)*/ {quote}"]
    calls = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        rules += [
            rule.replace(json.dumps(", "), json.dumps(","))
            for rule in listed(
                tool,
                name,
                lambda key, schema: f"{json.dumps(key + ':')} {_value_rule(schema, quote)}",
            )
        ]
        calls.append(f"{json.dumps(_CALL + tool.name + '{')} {name} {json.dumps('}')}")
    one = " | ".join(calls)
    return "\n".join([*rules, f"call: {mark(marks.begin)} ({one}) {mark(marks.end)}"])


def _value_rule(schema: object, quote: str) -> str:
    assert isinstance(schema, dict)
    if is_text(schema) and schema:
        if "enum" in schema:
            choices = " | ".join(json.dumps(value) for value in schema["enum"])
            return f"{quote} ({choices}) {quote}"
        return "text"
    if schema.get("type") in ("integer", "number", "boolean", "null"):
        return schema_rule(schema)  # which is written as in JSON
    return "value"
