"""Calls as DeepSeek V3.2 writes them, each argument in tags that say whether it is a string:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

A format: reads text, tells calls and content. V4 says `tool_calls` for `function_calls`.
"""  # noqa: RUF002

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.argument_types import (
    ArgumentSchema,
    arguments_of,
    as_json,
    word_as_json,
)
from manyroots.text.formats.call_grammars import repeated, text_or_json
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.text_arguments import TextArguments
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import Tool, ToolUse

_DSML = "｜DSML｜"  # noqa: RUF001
CALLS, CALLS_END = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
_CALLS_4, _CALLS_4_END = f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"
_ENDS = (CALLS_END, _CALLS_4_END)
INVOKE, INVOKE_END = f'<{_DSML}invoke name="', f"</{_DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{_DSML}parameter name="', f"</{_DSML}parameter>"
_STRING = re.compile(r'\s*string="(true|false)"\s*')


def parse_dsml(tools: Sequence[Tool]) -> Parse:
    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while (yield from reader.until(CALLS, _CALLS_4, to=writer.content)):
            mark: str | None = ""
            while mark is not None and mark not in _ENDS:
                text, mark = yield from reader.collect(INVOKE, *_ENDS)
                writer.content(text.strip())
                if mark == INVOKE:
                    mark = yield from _call(reader, writer, tools)

    return parse


def _call(
    reader: Reader, writer: AnswerWriter, tools: Sequence[Tool]
) -> Generator[None, None, str | None]:
    """Starts after the mark before its name; gives the mark that ended it."""
    name, mark = yield from reader.collect('">', "\n")
    if mark != '">':
        writer.content(INVOKE + name)
        return mark
    writer.call(name)
    arguments = TextArguments(writer, arguments_of(tools, name))

    def text(tell: Callable[[str], None]) -> Generator[None, None, bool]:
        return (yield from reader.until(PARAMETER_END, to=tell)) is not None

    while True:
        _, mark = yield from reader.collect(PARAMETER, INVOKE_END, *_ENDS)
        if mark != PARAMETER:
            break
        key, mark = yield from reader.collect('"')
        said, mark = yield from reader.collect(">")
        if mark is None:
            return None
        kind = _STRING.fullmatch(said)
        schema = arguments.schema.property(key)
        if kind is not None and kind[1] == "true":
            is_text, spell = schema.may_be_text, as_json
        elif kind is not None:
            is_text, spell = schema.types is not None and schema.is_text, word_as_json
        else:
            is_text, spell = schema.is_text, as_json
        if not (yield from arguments.value(key, text, is_text=is_text, spell=spell)):
            return None
    if mark is not None:
        arguments.end()
    return mark


def dsml_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else. Arguments come in the order of the schema."""
    line = json.dumps("\n")
    rules = [
        f"start: {mark(CALLS)} {line} {repeated(use, 'call', 'call')} {mark(CALLS_END)}",
    ]
    names = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        names.append(name)
        begin = json.dumps(f'{INVOKE}{tool.name}">\n')
        terms, more = text_or_json(tool, name, _begin, f"{PARAMETER_END}\n")
        end = json.dumps(f"{INVOKE_END}\n")
        rules.append(f"{name}: {begin} {' '.join(terms)} {end}")
        rules += more
    rules.append(f"call: {' | '.join(names)}")
    return "\n".join(rules)


def _begin(key: str, schema: ArgumentSchema) -> str:
    return f'{PARAMETER}{key}" string="{"true" if schema.may_be_text else "false"}">'


DSML = ToolFormat(
    "deepseek_v32",
    lambda use: parse_dsml(use.tools),
    dsml_grammar,
    told_by=((_DSML,),),
    aliases=("deepseekv32", "deepseek_v4"),
    begins=(CALLS, _CALLS_4),
    special_tokens=(CALLS, CALLS_END, _CALLS_4, _CALLS_4_END, _DSML),
)
