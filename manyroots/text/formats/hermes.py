"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

A format: reads text, tells calls and content. What stands between the marks and is no call is
content, marks included.
"""

from __future__ import annotations

import json

from manyroots.text.formats.call_grammars import json_call, repeated
from manyroots.text.formats.json_calls import parse_marked
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"


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


HERMES = ToolFormat(
    "hermes",
    lambda use: parse_marked((BEGIN,), (END,)),
    hermes_grammar,
    told_by=((BEGIN,),),
    aliases=("qwen", "qwen25", "granite4"),
    begins=(BEGIN,),
)
