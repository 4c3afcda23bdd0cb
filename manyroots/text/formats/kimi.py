"""Calls as Kimi K2 writes them, each with its id, which holds its name:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0
    <|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>

A format: reads text, tells calls and content. The template wants the ids back as they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.call_grammars import arguments_rule, repeated
from manyroots.text.formats.json_calls import copy_value
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?(.+?)(:\d+)?", re.DOTALL)


def parse_kimi(reader: Reader, writer: AnswerWriter) -> Wait:
    mark = yield from reader.until(*MARKS, to=writer.content)
    while mark is not None:
        if mark == CALL:
            mark = yield from _call(reader, writer)
        elif mark in (SECTION, CALL_END):
            text, mark = yield from reader.collect(*MARKS)  # nothing is said between calls
            writer.content("" if mark in (CALL, SECTION_END) else text)
        else:
            mark = yield from reader.until(*MARKS, to=writer.content)


def _call(reader: Reader, writer: AnswerWriter) -> Generator[None, None, str | None]:
    """Starts after its mark; gives the mark that follows."""
    head, mark = yield from reader.collect(ARGUMENTS, CALL_END, SECTION_END)
    found = _ID.fullmatch(head.strip())
    if mark != ARGUMENTS or found is None:
        writer.content(f"{CALL}{head}{mark or ''}")
        return CALL_END if mark == ARGUMENTS else mark
    writer.call(found[1], head.strip() if found[2] else None)
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from copy_value(reader, writer.arguments, is_closed=True)
    else:
        writer.arguments("{}")
    _, mark = yield from reader.collect(CALL_END, CALL, SECTION_END)
    return mark


def kimi_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else, with any number in their ids."""
    one = " | ".join(
        f"{json.dumps(f'functions.{tool.name}:')} NUMBER {mark(ARGUMENTS)} {arguments_rule(tool)}"
        for tool in use.callable_tools
    )
    return "\n".join(
        [
            f"start: {mark(SECTION)} {repeated(use, 'call', 'call')} {mark(SECTION_END)}",
            f"call: {mark(CALL)} ({one}) {mark(CALL_END)}",
            "NUMBER: /[0-9]{1,3}/",
        ]
    )


KIMI = ToolFormat(
    "kimi_k2",
    lambda use: parse_kimi,
    kimi_grammar,
    told_by=((SECTION,),),
    begins=(SECTION, CALL),
    special_tokens=MARKS,
)
