"""Calls as Qwen3-Coder writes them, each argument in tags of its own:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A format: reads text, tells calls and content. Arguments become JSON by their tool's schema; strings
are told as they come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.argument_types import (
    as_json,
    find_tool,
    inside_text,
    is_text,
    property_schema,
)
from manyroots.text.formats.call_grammars import repeated, text_or_json
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import Tool, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def parse_qwen_coder(tools: Sequence[Tool]) -> Parse:
    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        # The outer tags are sometimes left out.
        while mark := (yield from reader.until(BEGIN, FUNCTION, to=writer.content)):
            if mark == BEGIN:
                space = yield from reader.skip_space()
                if not (yield from reader.begins(FUNCTION)):
                    writer.content(BEGIN + space)
                    continue
            yield from _call(reader, writer, tools)

    return parse


def _call(reader: Reader, writer: AnswerWriter, tools: Sequence[Tool]) -> Wait:
    name, mark = yield from reader.collect(">")
    if mark is None:
        writer.content(FUNCTION + name)
        return
    name = name.strip()
    writer.call(name)
    tool = find_tool(tools, name)
    before = "{"
    while True:
        _, mark = yield from reader.collect(PARAMETER, FUNCTION_END, END)
        if mark != PARAMETER:
            break
        key, mark = yield from reader.collect(">")
        if mark is None:
            return
        yield from _argument(reader, writer, before, key.strip(), tool)
        before = ", "
    if mark is None:
        return
    writer.arguments("{}" if before == "{" else "}")
    if mark == FUNCTION_END:
        yield from reader.skip_space()
        yield from reader.begins(END)


def _argument(
    reader: Reader, writer: AnswerWriter, before: str, key: str, tool: Tool | None
) -> Wait:
    """One value, without the line breaks around it."""
    schema = property_schema(tool, key)
    yield from reader.begins("\n")
    begin = f"{before}{json.dumps(key, ensure_ascii=False)}: "
    if not is_text(schema):
        text, mark = yield from reader.collect(PARAMETER_END)
        if mark is not None:
            writer.arguments(begin + as_json(text.removesuffix("\n"), schema))
        return
    writer.arguments(f'{begin}"')
    held = ""

    def tell(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        writer.arguments(inside_text(text.removesuffix("\n")))

    if (yield from reader.until(PARAMETER_END, to=tell)):
        writer.arguments('"')


def qwen_coder_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else. Arguments come in the order of the schema."""
    rules = [f"start: {repeated(use, 'call', f'{json.dumps(chr(10))} call')}"]
    names = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        names.append(name)
        begin = json.dumps(f"\n{FUNCTION}{tool.name}>\n")
        terms, more = text_or_json(
            tool, name, lambda key: f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"
        )
        end = json.dumps(f"{FUNCTION_END}\n")
        rules.append(f"{name}: {mark(BEGIN)} {begin} {' '.join(terms)} {end} {mark(END)}")
        rules += more
    rules.append(f"call: {' | '.join(names)}")
    return "\n".join(rules)
