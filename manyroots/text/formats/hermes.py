"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

A format: reads text, tells calls and content. What stands between the marks and is no call is
content, marks included.
"""

from __future__ import annotations

import json

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.call_grammars import json_call, repeated
from manyroots.text.formats.json_calls import NotACallError, read_call
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"


def parse_hermes(reader: Reader, writer: AnswerWriter) -> Wait:
    while (yield from reader.until(BEGIN, to=writer.content)):
        yield from _calls(reader, writer)


def _calls(reader: Reader, writer: AnswerWriter) -> Wait:
    """What is between two marks: usually one call."""
    has_call = False
    while True:
        yield from reader.skip_space()
        if (yield from reader.begins(END)):
            return
        try:
            yield from read_call(reader, writer)
            has_call = True
        except NotACallError as error:
            if has_call:  # nothing after a call is part of the answer
                yield from reader.collect(END)
                return
            writer.content(BEGIN + error.text)
            rest, mark = yield from reader.collect(END)
            writer.content(rest + (mark or ""))
            return


def hermes_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else."""
    calls = " | ".join(json_call(tool, "arguments") for tool in use.callable_tools)
    begin, end, line = mark(BEGIN), mark(END), json.dumps("\n")
    return "\n".join(
        [
            f"start: {repeated(use, 'call', f'{line} call')}",
            f"call: {begin} {line} one {line} {end}",
            f"one: {calls}",
        ]
    )
