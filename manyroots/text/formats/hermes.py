"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

A format: reads text, tells calls and content. What stands between the marks and is no call is
content, marks included.
"""

from __future__ import annotations

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.json_calls import NotACallError, read_call
from manyroots.text.formats.reader import Reader, Wait

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
