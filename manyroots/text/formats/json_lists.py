"""Calls as a JSON list: [{"name": ..., "arguments": {...}}, ...], after a mark of the family's own
or, from xLAM, anywhere in the answer.

Formats: read text, tell calls and content.
"""

from __future__ import annotations

import json

from manyroots.text.formats.call_grammars import json_call, repeated
from manyroots.text.formats.json_calls import parse_marked, parse_unmarked
from manyroots.text.formats.thinking import Mark
from manyroots.text.formats.tool_format import ToolFormat
from manyroots.text.tools import ToolUse

_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_GRANITE = "<|tool_call|>"
_PHI, _PHI_TOKENS = "functools", ("<|tool_call|>", "<|/tool_call|>")
_NEMOTRON, _NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


def list_grammar(use: ToolUse, mark: Mark, begin: str = "", end: str = "") -> str:
    """A list of calls, and nothing else."""
    calls = repeated(use, "call", f"{json.dumps(', ')} call")
    around = [mark(text) if text else "" for text in (begin, end)]
    return "\n".join(
        [
            f"start: {around[0]} {json.dumps('[')} {calls} {json.dumps(']')} {around[1]}",
            f"call: {' | '.join(json_call(tool, 'arguments') for tool in use.callable_tools)}",
        ]
    )


GRANITE = ToolFormat(
    "granite",
    lambda use: parse_marked((_GRANITE, _TOOL_CALL), (_TOOL_CALL_END,)),
    lambda use, mark: list_grammar(use, mark, _GRANITE),
    told_by=((_GRANITE, "<|start_of_role|>"),),
    begins=(_GRANITE, _TOOL_CALL),
    special_tokens=(_GRANITE,),
)
PHI_4_MINI = ToolFormat(
    "phi4_mini_json",
    lambda use: parse_marked((_PHI, _PHI_TOKENS[0]), (_PHI_TOKENS[1],)),
    lambda use, mark: list_grammar(use, mark, _PHI),
    told_by=((_PHI,), ("<|tool|>", "<|/tool|>")),
    begins=(_PHI, _PHI_TOKENS[0]),
    special_tokens=_PHI_TOKENS,
)
NEMOTRON = ToolFormat(
    "nemotron_json",
    lambda use: parse_marked((_NEMOTRON,), (_NEMOTRON_END,)),
    lambda use, mark: list_grammar(use, mark, _NEMOTRON, _NEMOTRON_END),
    told_by=((_NEMOTRON,),),
    aliases=("llama_nemotron_json",),
    begins=(_NEMOTRON,),
    special_tokens=(_NEMOTRON, _NEMOTRON_END),
)
XLAM = ToolFormat(
    "xlam",
    lambda use: parse_unmarked(
        use.names, shown=("[TOOL_CALLS]", _TOOL_CALL), ends=(_TOOL_CALL_END,)
    ),
    list_grammar,
    told_by=(("xLAM", "JSON array"),),
    begins=(_TOOL_CALL,),
    is_like_json=True,
)
