"""Calls as Llama 3 writes them: {"name": ..., "parameters": {...}}, the whole answer or behind
<|python_tag|>; several are parted by semicolons.

A format: reads text, tells calls and content. An answer that begins like a call and is none is
content.
"""

from __future__ import annotations

import json

from manyroots.text.chat_output import AnswerWriter
from manyroots.text.formats.call_grammars import json_call, repeated
from manyroots.text.formats.json_calls import NotACallError, read_call
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.tools import ToolUse

PYTHON_TAG = "<|python_tag|>"


def parse_llama(reader: Reader, writer: AnswerWriter) -> Wait:
    space = yield from reader.skip_space()
    is_call = (yield from reader.peek()) == "{"
    if not is_call:
        writer.content(space)
        is_call = bool((yield from reader.until(PYTHON_TAG, to=writer.content)))
    while is_call:
        yield from reader.skip_space()
        try:
            yield from read_call(reader, writer)
        except NotACallError as error:
            writer.content(error.text)
            break
        while (yield from reader.peek()) in tuple(" \n\t;,"):
            reader.skip()
        is_call = bool((yield from reader.peek()))
        yield from reader.begins(PYTHON_TAG)
    yield from reader.rest(writer.content)


def llama_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else."""
    calls = " | ".join(json_call(tool, "parameters") for tool in use.callable_tools)
    more = f"{json.dumps('; ')} call"
    return f"start: {repeated(use, 'call', more)}\ncall: {calls}"
