"""The form of gpt-oss (harmony): messages with a channel each.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

What is on the channel analysis is reasoning, a message to functions.NAME is a call, all else is
content. A format: reads text, tells all three. Marks are special tokens; those that end the whole
answer never reach it.
"""

from __future__ import annotations

import json
import re

from manyroots.text.chat_output import AnswerWriter, Parse
from manyroots.text.formats.call_grammars import arguments_rule
from manyroots.text.formats.json_calls import copy_value
from manyroots.text.formats.reader import Reader, Wait
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


def parse_harmony(*, with_calls: bool) -> Parse:
    """`with_calls`: whether there are tools to call; else what is said to one is content."""

    def parse(reader: Reader, writer: AnswerWriter) -> Wait:
        while (yield from reader.peek()):
            header, mark = yield from reader.collect(MESSAGE)
            if mark is None:
                # Without a message, what stands there can only be meant as one.
                if CHANNEL not in header and START not in header:
                    writer.content(header)
                return
            yield from _message(reader, writer, header, with_calls)

    return parse


def _message(reader: Reader, writer: AnswerWriter, header: str, with_calls: bool) -> Wait:
    recipient = _RECIPIENT.search(header)
    if with_calls and recipient is not None and recipient[1] != "assistant":
        writer.call(recipient[1].removeprefix(_FUNCTIONS))
        yield from _arguments(reader, writer)
    elif header.partition(CHANNEL)[2].split()[:1] == ["analysis"]:
        yield from reader.until(END, CALL, RETURN, to=writer.reasoning)
        writer.end_reasoning()
    else:
        yield from reader.until(END, CALL, RETURN, to=writer.content)
        writer.end_content()


def _arguments(reader: Reader, writer: AnswerWriter) -> Wait:
    """Those of a function without parameters are sometimes left out."""
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":  # in whose strings a mark ends nothing
        yield from copy_value(reader, writer.arguments, is_closed=True)
        yield from reader.until(END, CALL, RETURN, to=_nothing)
    else:
        text, _ = yield from reader.collect(END, CALL, RETURN)
        writer.arguments(text or "{}")


def _nothing(text: str) -> None:
    """Receives what follows the arguments."""


_THOUGHTS = r"thoughts: ({channel} HEAD {message} TEXT {end} {start} {assistant})*"
_TERMINALS = [r"HEAD: /(analysis|commentary)[^<]{0,40}/", r"TEXT: /(.|\n)*/"]


def _thoughts(mark: Mark) -> list[str]:
    """Messages before the one that counts."""
    line = _THOUGHTS.format(
        channel=mark(CHANNEL),
        message=mark(MESSAGE),
        end=mark(END),
        start=mark(START),
        assistant=json.dumps("assistant"),
    )
    return [line, *_TERMINALS]


def harmony_prefix(mark: Mark) -> str:
    """Lark's rule `prefix`: all that comes before an answer of some shape."""
    final = f"{mark(CHANNEL)} {json.dumps('final')} {mark(MESSAGE)}"
    return "\n".join([f"prefix: thoughts {final}", *_thoughts(mark)])


def harmony_grammar(use: ToolUse, mark: Mark) -> str:
    """Reasoning, and one call."""
    calls = " | ".join(
        f"{json.dumps(f'commentary to={_FUNCTIONS}{tool.name} ')} {mark(CONSTRAIN)} "
        f"{json.dumps('json')} {mark(MESSAGE)} {arguments_rule(tool)}"
        for tool in use.callable_tools
    )
    return "\n".join([f"start: thoughts {mark(CHANNEL)} ({calls})", *_thoughts(mark)])


HARMONY = ToolFormat(
    "openai",
    lambda use: parse_harmony(with_calls=use.is_on),
    harmony_grammar,
    told_by=((CHANNEL, MESSAGE),),
    aliases=("gpt-oss",),
    special_tokens=MARKS,
    prefix=harmony_prefix,
)
