"""Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, each argument in tags of its own:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A format: reads text, tells calls and content. Arguments become JSON by their tool's schema; strings
are told as they come. Where a tag is missing that ends an argument, the next argument of the tool
ends it, or the end of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.argument_types import arguments_of
from manyroots.text.formats.call_grammars import repeated, text_or_json
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.text_arguments import TextArguments
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
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
            name, mark = yield from reader.collect(">")
            if mark is None:
                writer.content(FUNCTION + name)
                return
            yield from _Call(reader, writer, tools, name.strip()).read()

    return parse


class _Call:
    def __init__(
        self, reader: Reader, writer: AnswerWriter, tools: Sequence[Tool], name: str
    ) -> None:
        writer.call(name)
        self._reader = reader
        self._arguments = TextArguments(writer, arguments_of(tools, name))
        self._next: str | None = None
        """An argument whose tag has been read."""
        self._is_over = False
        """The call's end has been read."""

    def read(self) -> Wait:
        mark: str | None = None
        while not self._is_over:
            key = self._next
            if key is None:
                _, mark = yield from self._reader.collect(PARAMETER, FUNCTION_END, END)
                if mark != PARAMETER:
                    break
                key, mark = yield from self._reader.collect(">")
            if mark is None:
                return
            self._next = None
            yield from self._reader.begins("\n")
            is_whole = yield from self._arguments.value(key.strip(), self._text, trailing="\n")
            if not is_whole:
                return
        if mark is None:
            return
        self._arguments.end()
        if mark == FUNCTION_END and not self._is_over:
            yield from self._reader.skip_space()
            yield from self._reader.begins(END)

    def _text(self, tell: Callable[[str], None]) -> Generator[None, None, bool]:
        """One value, up to its end or to what can't be part of it."""
        while True:
            mark = yield from self._reader.until(PARAMETER_END, PARAMETER, FUNCTION_END, to=tell)
            if mark is None:
                return False
            if mark == PARAMETER_END:
                return True
            if mark == PARAMETER:
                key, closed = yield from self._reader.collect(">", "\n")
                is_known = key in self._arguments.schema.names() - self._arguments.keys
                if closed == ">" and is_known:
                    self._next = key
                    return True
                tell(f"{PARAMETER}{key}{closed or ''}")
                continue
            space = yield from self._reader.skip_space()
            is_end = yield from self._reader.begins(END)
            if not is_end and (yield from self._reader.begins(BEGIN)):
                self._reader.unread(BEGIN)
                is_end = True
            if is_end or (yield from self._reader.peek()) == "":
                self._is_over = True
                return True
            tell(FUNCTION_END + space)


def qwen_coder_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else. Arguments come in the order of the schema."""
    rules = [f"start: {repeated(use, 'call', f'{json.dumps(chr(10))} call')}"]
    names = []
    for place, tool in enumerate(use.callable_tools):
        name = f"call_{place}"
        names.append(name)
        begin = json.dumps(f"\n{FUNCTION}{tool.name}>\n")
        terms, more = text_or_json(
            tool, name, lambda key, _: f"{PARAMETER}{key}>\n", f"\n{PARAMETER_END}\n"
        )
        end = json.dumps(f"{FUNCTION_END}\n")
        rules.append(f"{name}: {mark(BEGIN)} {begin} {' '.join(terms)} {end} {mark(END)}")
        rules += more
    rules.append(f"call: {' | '.join(names)}")
    return "\n".join(rules)


QWEN_CODER = ToolFormat(
    "qwen3_coder",
    lambda use: parse_qwen_coder(use.tools),
    qwen_coder_grammar,
    told_by=((FUNCTION, PARAMETER),),
    aliases=("qwen3_xml", "nemotron_v3"),
    begins=(BEGIN, FUNCTION),
)
