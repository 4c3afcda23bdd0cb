"""Grammars of calls: what a model must write where it has to call a tool.

Takes the tools that a choice leaves; gives Lark in which arguments follow their tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from manyroots.text.tools import Tool, ToolUse

MAX_CALLS = 16
"""In one answer that has to call: a small model would go on forever."""
_COMPACT = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A]{1,20}"}


def arguments_rule(tool: Tool) -> str:
    """Lark's terms for the arguments of a tool, as JSON."""
    schema: Mapping[str, Any] = tool.parameters or {"type": "object", "properties": {}}
    if "type" not in schema and "$ref" not in schema:
        schema = {**schema, "type": "object"}
    return f"%json {json.dumps({**schema, 'x-guidance': _COMPACT})}"


def json_call(tool: Tool, arguments_key: str) -> str:
    """A call as a JSON object, the name first."""
    begin = f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": '
    return f"{json.dumps(begin)} {arguments_rule(tool)} {json.dumps('}')}"


def repeated(use: ToolUse, first: str, more: str) -> str:
    """One call, or several where they are welcome."""
    if not use.is_parallel:
        return first
    return f"{first} ({more}){{0,{MAX_CALLS - 1}}}"
