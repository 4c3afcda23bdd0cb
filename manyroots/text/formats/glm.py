"""Calls as GLM 4.5 and 4.6 write them; 4.7 leaves out the line breaks between the tags:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A format: reads text, tells calls and content. Arguments become JSON by their tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.argument_types import arguments_of
from manyroots.text.formats.call_grammars import repeated, text_or_json
from manyroots.text.formats.python_values import NAME
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.text_arguments import TextArguments
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import Tool, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(rf"\s*({NAME})\s*")


def parse_glm(tools: Sequence[Tool]) -> Parse:
    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        mark = yield from reader.until(BEGIN, to=writer.content)
        while mark is not None:
            head = ""
            while (character := (yield from reader.peek())) and character != "<":
                head += character
                reader.skip()
                if head.strip() and not _NAME.fullmatch(head):
                    break
            found = _NAME.fullmatch(head)
            if found is None or character != "<":
                writer.content(BEGIN + head)
                mark = yield from reader.until(BEGIN, to=writer.content)
                continue
            mark = yield from _call(reader, writer, tools, found[1])
            if mark != BEGIN:
                mark = yield from reader.until(BEGIN, to=writer.content)

    return parse


def _call(
    reader: Reader, writer: AnswerWriter, tools: Sequence[Tool], name: str
) -> Generator[None, None, str | None]:
    """Starts after its name; gives the mark that ended it."""
    writer.call(name)
    arguments = TextArguments(writer, arguments_of(tools, name))

    def text(tell: Callable[[str], None]) -> Generator[None, None, bool]:
        return (yield from reader.until(VALUE_END, to=tell)) is not None

    while True:
        _, mark = yield from reader.collect(KEY, END, BEGIN)
        if mark != KEY:
            break
        key, _ = yield from reader.collect(KEY_END)
        _, mark = yield from reader.collect(VALUE)
        if mark is None or not (yield from arguments.value(key.strip(), text)):
            return None
    if mark is not None:
        arguments.end()
    return mark


def glm_grammar(use: ToolUse, mark: Mark, line: str = "\n") -> str:
    """Calls, and nothing else. Arguments come in the order of the schema. `line`: what stands
    between tags."""
    rules = [f"start: {repeated(use, 'call', f'{json.dumps(line)} call')}"]
    names = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        names.append(name)
        terms, more = text_or_json(
            tool, name, lambda key, _: f"{KEY}{key}{KEY_END}{line}{VALUE}", f"{VALUE_END}{line}"
        )
        head = json.dumps(tool.name + line)
        rules.append(f"{name}: {mark(BEGIN)} {head} {' '.join(terms)} {mark(END)}")
        rules += more
    rules.append(f"call: {' | '.join(names)}")
    return "\n".join(rules)


GLM = ToolFormat(
    "glm45",
    lambda use: parse_glm(use.tools),
    glm_grammar,
    told_by=((KEY, VALUE),),
    aliases=("glm",),
    begins=(BEGIN,),
    special_tokens=(BEGIN, END, KEY, KEY_END, VALUE, VALUE_END),
)
GLM_47 = replace(
    GLM,
    name="glm47",
    grammar=lambda use, mark: glm_grammar(use, mark, ""),
    told_by=((KEY_END + VALUE,),),
    aliases=(),
)
