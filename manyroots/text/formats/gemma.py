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
    ArgumentSchema,
    arguments_of,
    as_json,
    inside_text,
    word_as_json,
)
from manyroots.text.formats.call_grammars import listed, repeated, schema_rule, text_choices
from manyroots.text.formats.json_calls import copy_value
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
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
        while mark := (yield from reader.until(marks.begin, marks.end, to=writer.content)):
            if mark == marks.end:
                continue  # of nothing
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
            arguments = _Arguments(reader, writer, marks)
            yield from arguments.read(arguments_of(tools, name.strip()))
            yield from reader.skip_space()

    return parse


class _OverError(Exception):
    """The call ends before its brackets do."""


class _Arguments:
    """Copies Gemma's values as JSON."""

    def __init__(self, reader: Reader, writer: AnswerWriter, marks: GemmaMarks) -> None:
        self._reader = reader
        self._tell = writer.arguments
        self._marks = marks
        self._open = ""
        """Brackets that close what is open."""

    def read(self, schema: ArgumentSchema) -> Wait:
        """Starts after the opening bracket."""
        try:
            yield from self._object(schema)
        except _OverError:
            self._tell(self._open[::-1])

    def _object(self, schema: ArgumentSchema) -> Wait:
        self._tell("{")
        self._open += "}"
        before = ""
        while not (yield from self._closes("}")):
            key = yield from self._key()
            self._tell(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._value(schema.property(key))

    def _list(self, schema: ArgumentSchema) -> Wait:
        self._tell("[")
        self._open += "]"
        before = ""
        while not (yield from self._closes("]")):
            self._tell(before)
            before = ", "
            yield from self._value(schema)

    def _closes(self, bracket: str) -> Generator[None, None, bool]:
        """Whether an object or a list is over, with its bracket, which is told then."""
        while True:
            yield from self._reader.skip_space()
            character = yield from self._reader.peek()
            if character == ",":
                self._reader.skip()
                continue
            if character == bracket:
                self._reader.skip()
                self._tell(bracket)
                self._open = self._open[:-1]
                return True
            if character == "":
                self._open = ""  # cut short; it is told as far as it goes
                raise _OverError
            yield from self._check_mark()
            return False

    def _check_mark(self) -> Wait:
        if (yield from self._reader.begins(self._marks.end)):
            raise _OverError

    def _key(self) -> Generator[None, None, str]:
        for quote in (self._marks.quote, '"'):
            if (yield from self._reader.begins(quote)):
                key, _ = yield from self._reader.collect(quote)
                yield from self._reader.collect(":")
                return key
        key, mark = yield from self._reader.collect(":", "}", self._marks.end)
        if mark is None:
            self._open = ""
        if mark != ":":
            raise _OverError
        return key.strip()

    def _value(self, schema: ArgumentSchema) -> Wait:
        yield from self._reader.skip_space()
        if (yield from self._reader.begins(self._marks.quote)):
            yield from self._text(schema)
            return
        character = yield from self._reader.peek()
        if character in ("{", "[") and len(self._open) < _MAX_DEPTH:
            self._reader.skip()
            yield from self._object(schema) if character == "{" else self._list(schema.item())
            return
        if character == '"':
            yield from copy_value(self._reader, self._tell)
            return
        word = ""
        while (character := (yield from self._reader.peek())) and character not in ",}]":
            if character == "<" and (yield from self._reader.begins(self._marks.end)):
                self._tell(word_as_json(word.strip(), schema))
                raise _OverError
            word += character
            self._reader.skip()
        if character:
            self._tell(word_as_json(word.strip(), schema))

    def _text(self, schema: ArgumentSchema) -> Wait:
        """Starts after its opening quote. A number is written like a string by some."""
        if schema.may_be_text:
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
                lambda key, schema, root=tool.parameters or {}: (  # type: ignore[misc]
                    f"{json.dumps(key + ':')} {_value_rule(ArgumentSchema(schema, root), quote)}"
                ),
            )
        ]
        calls.append(f"{json.dumps(_CALL + tool.name + '{')} {name} {json.dumps('}')}")
    one = " | ".join(calls)
    return "\n".join([*rules, f"call: {mark(marks.begin)} ({one}) {mark(marks.end)}"])


def _value_rule(argument: ArgumentSchema, quote: str) -> str:
    types = argument.types
    if types is not None and argument.is_text:
        choices = text_choices(argument)
        return "text" if choices is None else f"{quote} ({choices}) {quote}"
    if types is not None and types <= {"integer", "number", "boolean", "null"}:
        return schema_rule(argument.schema, argument.root)  # which is written as in JSON
    return "value"


def _gemma(name: str, marks: GemmaMarks) -> ToolFormat:
    return ToolFormat(
        name,
        lambda use: parse_gemma(marks, use.tools),
        lambda use, mark: gemma_grammar(marks, use, mark),
        told_by=((marks.begin,),),
        begins=(marks.begin,),
        special_tokens=(marks.begin, marks.end, marks.quote),
    )


GEMMA = _gemma("gemma4", GEMMA_4)
FUNCTIONGEMMA = _gemma("functiongemma", FUNCTION_GEMMA)
