"""Calls as DeepSeek's models write them, each between marks: since V3.1 its name and JSON; before,
the word function, its name and JSON in a fence.

A format: reads text, tells calls and content.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.call_grammars import arguments_rule, repeated
from manyroots.text.formats.json_calls import copy_value
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
_FENCE = "```json"


def parse_deepseek(reader: Reader, writer: AnswerWriter) -> Wait:
    # The outermost mark is sometimes left out.
    mark = yield from reader.until(CALLS_BEGIN, CALL_BEGIN, to=writer.content)
    while mark is not None:
        if mark == CALL_BEGIN:
            mark = yield from _call(reader, writer)
        elif mark == CALLS_END:
            mark = yield from reader.until(CALLS_BEGIN, CALL_BEGIN, to=writer.content)
        else:
            text, mark = yield from reader.collect(CALL_BEGIN, CALLS_END)
            writer.content(text.strip())


def _call(reader: Reader, writer: AnswerWriter) -> Generator[None, None, str | None]:
    """Starts after its mark; gives the mark that follows."""
    head, mark = yield from reader.collect(SEPARATOR, CALL_END)
    if mark != SEPARATOR:
        writer.content(f"{CALL_BEGIN}{head}{mark or ''}")
        return mark
    name = head.strip()
    if name == "function":
        name, mark = yield from reader.collect(_FENCE, CALL_END)
        if mark != _FENCE:
            writer.content(name)
            return mark
    writer.call(name.strip())
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from copy_value(reader, writer.arguments, is_closed=True)
    else:
        writer.arguments("{}")
    _, mark = yield from reader.collect(CALL_END, CALL_BEGIN, CALLS_END)
    return mark


def deepseek_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls since V3.1, and nothing else."""
    one = " | ".join(
        f"{json.dumps(tool.name)} {mark(SEPARATOR)} {arguments_rule(tool)}"
        for tool in use.callable_tools
    )
    return _grammar(use, mark, one, "call")


def deepseek_fenced_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls before V3.1, and nothing else."""
    kind, end = json.dumps("function"), json.dumps("\n```")
    calls = []
    for tool in use.callable_tools:
        name = json.dumps(f"{tool.name}\n{_FENCE}\n")
        calls.append(f"{kind} {mark(SEPARATOR)} {name} {arguments_rule(tool)} {end}")
    return _grammar(use, mark, " | ".join(calls), f"{json.dumps(chr(10))} call")


def _grammar(use: ToolUse, mark: Mark, one: str, more: str) -> str:
    calls = repeated(use, "call", more)
    return (
        f"start: {mark(CALLS_BEGIN)} {calls} {mark(CALLS_END)}\n"
        f"call: {mark(CALL_BEGIN)} ({one}) {mark(CALL_END)}"
    )


DEEPSEEK = ToolFormat(
    "deepseek_v31",
    lambda use: parse_deepseek,
    deepseek_grammar,
    told_by=((CALLS_BEGIN,),),
    aliases=("deepseekv31",),
    begins=(CALLS_BEGIN, CALL_BEGIN),
    special_tokens=MARKS,
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    name="deepseek_v3",
    grammar=deepseek_fenced_grammar,
    told_by=((CALLS_BEGIN, _FENCE),),
    aliases=("deepseekv3",),
)
