"""Arguments that a model writes as plain text, turned into JSON by their tool's schema.

Takes an argument's text and its schema; gives JSON text. A schema that allows strings keeps a text
a string, unless the text is a value of another type that it allows, too. What a schema does not say
is a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyroots.text.formats.python_values import NotPythonError, read_value
from manyroots.text.tools import Tool

_WORDS = {"True": "true", "False": "false", "None": "null"}
"""As models that have read much Python write them."""
_MAX_REFERENCES = 20
_STRING = frozenset({"string"})
JSON_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


@dataclass(frozen=True, slots=True)
class ArgumentSchema:
    """The schema of one value, and the whole one that it may refer to. A schema that says nothing
    has no types."""

    schema: Mapping[str, Any]
    root: Mapping[str, Any]

    @property
    def types(self) -> frozenset[str] | None:
        """JSON types that the value may have; None where nothing is said."""
        return _types(self.schema, self.root, _MAX_REFERENCES)

    @property
    def is_text(self) -> bool:
        """Whether the value can only be a string."""
        return self.types in (None, _STRING)

    @property
    def may_be_text(self) -> bool:
        types = self.types
        return types is None or "string" in types

    def property(self, name: str) -> ArgumentSchema:
        """Of one property of the value."""
        for schema in _branches(self.schema, self.root, _MAX_REFERENCES):
            named = schema.get("properties")
            if isinstance(named, Mapping) and isinstance(named.get(name), Mapping):
                return ArgumentSchema(named[name], self.root)
            if isinstance(others := schema.get("additionalProperties"), Mapping):
                return ArgumentSchema(others, self.root)
        return ArgumentSchema({}, self.root)

    def item(self) -> ArgumentSchema:
        """Of the items of the value."""
        for schema in _branches(self.schema, self.root, _MAX_REFERENCES):
            if isinstance(items := schema.get("items"), Mapping):
                return ArgumentSchema(items, self.root)
        return ArgumentSchema({}, self.root)

    def names(self) -> frozenset[str]:
        """The properties that are named."""
        found: set[str] = set()
        for schema in _branches(self.schema, self.root, _MAX_REFERENCES):
            if isinstance(named := schema.get("properties"), Mapping):
                found.update(named)
        return frozenset(found)

    def choices(self) -> list[Any] | None:
        """The values of an `enum`; None without one."""
        for schema in _branches(self.schema, self.root, _MAX_REFERENCES):
            if isinstance(listed := schema.get("enum"), list):
                return listed
        return None


def arguments_of(tools: Sequence[Tool], name: str) -> ArgumentSchema:
    """The schema of a tool's arguments; one that says nothing for an unknown tool."""
    found = next((tool for tool in tools if tool.name == name), None)
    parameters = (found.parameters if found is not None else None) or {}
    return ArgumentSchema(parameters, parameters)


def as_json(text: str, schema: ArgumentSchema) -> str:
    """An argument's plain text as JSON."""
    types = schema.types
    if types is None or types == _STRING:
        return json.dumps(text, ensure_ascii=False)
    return word_as_json(text, schema)


def word_as_json(text: str, schema: ArgumentSchema) -> str:
    """The same where a string would have quotes: without a schema, JSON is taken for JSON."""
    types = schema.types
    if types == _STRING:
        return json.dumps(text, ensure_ascii=False)
    word = _WORDS.get(text.strip(), text.strip())
    try:
        kinds = _kinds(json.loads(word, parse_constant=_refuse))
        if types is None or "string" not in types or (kinds - _STRING) & types:
            return word
    except (ValueError, RecursionError):
        if types is not None and types & {"object", "array"} and word[:1] in ("{", "["):
            try:  # as Python writes it
                return json.dumps(read_value(word), ensure_ascii=False)
            except NotPythonError:
                pass  # not what the schema says; then as it is
    return json.dumps(text, ensure_ascii=False)


def inside_text(text: str) -> str:
    """Part of a JSON string, without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _kinds(value: Any) -> frozenset[str]:
    """The types of a schema that take a value."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return _STRING
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    found = _own_types(schema, root, depth)
    if found is not None and schema.get("nullable") is True:
        return found | {"null"}
    return found


def _own_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> frozenset[str] | None:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list) and kind:
        return frozenset(one for one in kind if isinstance(one, str))
    if isinstance(listed := schema.get("enum"), list) and listed:
        return frozenset().union(*map(_kinds, listed))
    if "const" in schema:
        return _kinds(schema["const"])
    if "$ref" in schema:
        return _types(referred(schema["$ref"], root), root, depth - 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(word), list) and parts:
            return _union(_types(part, root, depth - 1) for part in parts)
    if isinstance(parts := schema.get("allOf"), list):
        known = [_types(part, root, depth - 1) for part in parts]
        return next((types for types in known if types is not None), None)
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return None


def _union(parts: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset()
    for types in parts:
        if types is None:
            return None
        found |= types
    return found


def _branches(schema: Any, root: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    """The schema and those that it is put together of."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    found = [schema]
    if "$ref" in schema:
        found += _branches(referred(schema["$ref"], root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(word), list):
            for part in parts:
                found += _branches(part, root, depth - 1)
    return found


def referred(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `$ref` within the schema refers to; an empty schema for what is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
