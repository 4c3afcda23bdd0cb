"""Arguments that a model writes as plain text, turned into JSON by their tool's schema.

Takes tools and names; gives JSON text. What a schema does not say is a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manyroots.text.tools import Tool

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""As models that have read much Python write them."""


def property_schema(tool: Tool | None, name: str) -> Mapping[str, Any]:
    """What a tool's schema says of one argument; nothing if it does not say."""
    parameters = tool.parameters if tool is not None else None
    properties = parameters.get("properties") if parameters is not None else None
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether an argument can only be a string."""
    kind = schema.get("type")
    if "enum" in schema and kind is None:
        return all(isinstance(value, str) for value in schema["enum"])
    options = [schema.get(word) for word in ("anyOf", "oneOf", "allOf", "$ref")]
    return kind in (None, "string", ["string"]) and not any(options)


def as_json(text: str, schema: Mapping[str, Any]) -> str:
    """An argument's text as JSON."""
    if not is_text(schema):
        word = _WORDS.get(text.strip(), text.strip())
        try:
            return json.dumps(json.loads(word), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # not what the schema says; then as it is
    return json.dumps(text, ensure_ascii=False)


def find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def inside_text(text: str) -> str:
    """Part of a JSON string, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
