"""Grammars of calls: what a model must write where it has to call a tool.

Takes the tools that a choice leaves; gives Lark in which arguments follow their tool's schema.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from manyroots.errors import RequestError
from manyroots.grammar.json_schemas import WHITE_SPACE, closed
from manyroots.text.formats.argument_types import JSON_TYPES, ArgumentSchema
from manyroots.text.tools import Tool, ToolUse

MAX_CALLS = 16
"""In one answer that has to call: a small model would go on forever."""
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}


def schema_rule(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> str:
    """Lark's terms for JSON that follows a schema, which may refer to definitions of `root`."""
    shared = {word: root[word] for word in ("$defs", "definitions") if root and word in root}
    try:
        made = closed({**shared, **schema})
    except ValueError as error:
        raise RequestError(f"the parameters of a tool: {error}", field="tools") from error
    return f"%json {json.dumps({**made, 'x-guidance': _OPTIONS})}"


def arguments_rule(tool: Tool) -> str:
    """Lark's terms for the arguments of a tool, as one JSON object."""
    schema: Mapping[str, Any] = tool.parameters or {"type": "object", "properties": {}}
    if "type" not in schema and "$ref" not in schema:
        schema = {**schema, "type": "object"}
    return schema_rule(schema)


def calls_instead(grammar: Callable[[ToolUse], str], use: ToolUse, before: str) -> str:
    """Lark's rule `instead` for calls that the model may make rather than answer. `grammar`: of
    calls and nothing else. As with every call that is not forced, arguments need not follow their
    schema in full, which a grammar might not know. `before`: terms that come first."""
    loose = [dataclasses.replace(tool, parameters=_loosely(tool)) for tool in use.tools]
    made = grammar(dataclasses.replace(use, tools=tuple(loose)))
    return f"instead: {before} called\n{re.sub(r'^start:', 'called:', made, count=1, flags=re.M)}"


def _loosely(tool: Tool) -> dict[str, Any]:
    """The names of a tool's parameters, and their types."""
    root, found = tool.parameters or {}, properties_of(tool)
    types = {name: ArgumentSchema(schema, root).types or frozenset() for name, schema, _ in found}
    return {
        "type": "object",
        "properties": {
            name: {"type": sorted(some)} if some and some <= JSON_TYPES else {}
            for name, some in types.items()
        },
        "required": [name for name, _, is_required in found if is_required],
        "additionalProperties": True,
    }


def json_call(tool: Tool, arguments_key: str) -> str:
    """A call as a JSON object, the name first."""
    begin = f'{{"name": {json.dumps(tool.name)}, "{arguments_key}": '
    return f"{json.dumps(begin)} {arguments_rule(tool)} {json.dumps('}')}"


def properties_of(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Names, schemas, and whether they are required."""
    parameters = tool.parameters or {}
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    return [
        (name, schema if isinstance(schema, Mapping) else {}, name in required)
        for name, schema in properties.items()
    ]


def text_or_json(
    tool: Tool, prefix: str, begin: Callable[[str, ArgumentSchema], str], end: str
) -> tuple[list[str], list[str]]:
    """Terms for a tool's arguments one after the other, each between `begin` of its name and `end`,
    what may be a string as plain text and all else as JSON; and the rules that the terms need.
    Rules are named by `prefix`."""
    terms, rules = [], []
    for place, (key, schema, is_required) in enumerate(properties_of(tool)):
        name = f"{prefix}_{place}"
        argument = ArgumentSchema(schema, tool.parameters or {})
        opening = json.dumps(begin(key, argument))
        choices = text_choices(argument)
        if choices is not None:
            rules.append(f"{name}: {opening} ({choices}) {json.dumps(end)}")
        elif argument.may_be_text:
            rules.append(f"{name}: {opening} {name}_text")
            rules.append(rf"{name}_text[lazy]: /(.|\n)*/ {json.dumps(end)}")
        else:
            value = schema_rule(schema, tool.parameters)
            rules.append(f"{name}: {opening} {value} {json.dumps(end)}")
        terms.append(name if is_required else f"{name}?")
    return terms, rules


def text_choices(argument: ArgumentSchema) -> str | None:
    """Lark's alternatives for an `enum` of strings, as plain text; None for other arguments."""
    choices = argument.choices()
    if not choices or not argument.may_be_text:
        return None
    spelled = (value if isinstance(value, str) else json.dumps(value) for value in choices)
    return " | ".join(map(json.dumps, spelled))


def listed(tool: Tool, prefix: str, term: Callable[[str, Mapping[str, Any]], str]) -> list[str]:
    """Rules for a tool's arguments with commas between them, those that are not required in or out;
    the first rule is called `prefix`. `term` gives the Lark of one argument."""
    found = properties_of(tool)
    rules = []
    for place, (key, schema, is_required) in enumerate(found):
        one = term(key, schema)
        follow = f"{prefix}_{place + 1}_more"
        skip = "" if is_required else f" | {prefix}_{place + 1}"
        skip_more = "" if is_required else f" | {follow}"
        rules.append(f"{prefix}_{place}: {one} {follow}{skip}")
        rules.append(f"{prefix}_{place}_more: {json.dumps(', ')} {one} {follow}{skip_more}")
    rules += [f'{prefix}_{len(found)}: ""', f'{prefix}_{len(found)}_more: ""']
    return [f"{prefix}: {prefix}_0", *rules]


def repeated(use: ToolUse, first: str, more: str) -> str:
    """One call, or several where they are welcome."""
    if not use.is_parallel:
        return first
    return f"{first} ({more}){{0,{MAX_CALLS - 1}}}"
