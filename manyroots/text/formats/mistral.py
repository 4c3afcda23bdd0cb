"""Calls as Mistral's models write them, after [TOOL_CALLS]: a JSON list of calls, or for each its
name, [ARGS] and the arguments. A tool's name alone is a call, too.

A format: reads text, tells calls and content.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Collection
from dataclasses import replace

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.call_grammars import arguments_rule, json_call, repeated
from manyroots.text.formats.json_calls import copy_value, read_list
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits


def mistral_id() -> str:
    """Their templates take ids of nine letters and digits alone."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def as_mistral_id(text: str) -> str:
    """The same for an id of another kind, always the same for the same."""
    if len(text) == 9 and text.isalnum() and text.isascii():
        return text
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:9]


def parse_mistral(offered: Collection[str]) -> Parse:
    """`offered`: names of tools, which need no arguments after them."""

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while (yield from reader.until(CALLS, to=writer.content)):
            space = yield from reader.skip_space()
            if (yield from reader.peek()) in ("[", "{"):
                has_call, text = yield from read_list(reader, writer)
                writer.content(text if has_call else CALLS + space + text)
            else:
                yield from _named(reader, writer, offered, space)

    return parse


def _named(reader: Reader, writer: AnswerWriter, offered: Collection[str], space: str) -> Wait:
    """A name, and its arguments as they come."""
    name = ""
    while (character := (yield from reader.peek())) not in ("", "{", "["):
        name += character
        reader.skip()
    call_id = None
    if (yield from reader.begins(CALL_ID)):
        call_id, _ = yield from reader.collect(ARGUMENTS)
    else:
        yield from reader.begins(ARGUMENTS)
    yield from reader.skip_space()
    has_arguments = (yield from reader.peek()) == "{"
    if not name.strip() or not (has_arguments or name.strip() in offered):
        writer.content(CALLS + space + name)
        return
    writer.call(name.strip(), call_id)
    if has_arguments:
        yield from copy_value(reader, writer.arguments)
    else:
        writer.arguments("{}")


def mistral_grammar(use: ToolUse, mark: Mark) -> str:
    """A list of calls, and nothing else."""
    one = " | ".join(json_call(tool, "arguments") for tool in use.callable_tools)
    calls = repeated(use, "call", f"{json.dumps(', ')} call")
    return f"start: {mark(CALLS)} {json.dumps('[')} {calls} {json.dumps(']')}\ncall: {one}"


def mistral_named_grammar(use: ToolUse, mark: Mark) -> str:
    """The newer form."""
    one = " | ".join(
        f"{json.dumps(tool.name)} {mark(ARGUMENTS)} {arguments_rule(tool)}"
        for tool in use.callable_tools
    )
    return f"start: {repeated(use, 'call', 'call')}\ncall: {mark(CALLS)} ({one})"


MISTRAL = ToolFormat(
    "mistral",
    lambda use: parse_mistral(use.names),
    mistral_grammar,
    told_by=((CALLS,),),
    begins=(CALLS,),
    special_tokens=(CALLS, ARGUMENTS, CALL_ID),
    new_id=mistral_id,
    fit_id=as_mistral_id,
)
MISTRAL_NAMED = replace(MISTRAL, grammar=mistral_named_grammar, told_by=((CALLS, ARGUMENTS),))
