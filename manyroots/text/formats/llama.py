"""Calls as Llama 3 writes them: {"name": ..., "parameters": {...}}, alone, among other text or
after <|python_tag|>; several are separated by semicolons.

A format: reads text, tells calls and content. An object that does not name one of the tools is
content, and so is one that says something else of it than arguments.
"""

from __future__ import annotations

import json

from manyroots.text.formats.call_grammars import json_call, repeated
from manyroots.text.formats.json_calls import parse_unmarked
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

PYTHON_TAG = "<|python_tag|>"


def llama_grammar(use: ToolUse, mark: Mark) -> str:
    """Calls, and nothing else."""
    calls = " | ".join(json_call(tool, "parameters") for tool in use.callable_tools)
    more = f"{json.dumps('; ')} call"
    return f"start: {repeated(use, 'call', more)}\ncall: {calls}"


LLAMA = ToolFormat(
    "llama3_json",
    lambda use: parse_unmarked(use.names, hidden=(PYTHON_TAG,)),
    llama_grammar,
    told_by=(('"parameters": dictionary of argument',), (PYTHON_TAG,)),
    aliases=("llama4_json", "llama3"),
    begins=(PYTHON_TAG,),
    is_like_json=True,
    special_tokens=(PYTHON_TAG,),
)
