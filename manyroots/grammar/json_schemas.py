"""JSON schemas as a model that must follow them should read them.

Takes a schema; gives one that allows less, never more. Objects that name their properties and say
nothing of others get no others: a small model would add them without an end, and a caller whose
type has two fields wants two. Knows no grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from manyroots.grammar.spelled_out import exact_format, property_names, unique_items

WHITE_SPACE = r"\x20{1,2}|\x20?\x0D?\x0A[\x20\x09]{0,32}"
"""What may stand between JSON's tokens: a space, or the end of a line and the next one's
indentation. Where more is allowed, a small model writes empty lines without an end."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value has schemas by name."""
_LISTED = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "$defs", "definitions", "discriminator",
}  # fmt: skip
_JOINING = {
    "allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "propertyNames", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
"""Keywords through which several schemas judge one value: what one leaves open another may need."""

_OF_OTHERS = ("additionalProperties", "patternProperties", "minProperties", "maxProperties")
"""Keywords that speak of properties without a name."""


_REFERENCE = re.compile(r"([\w.~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)
_NEWEST = re.compile(r"https?://json-schema\.org/schema#?")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not name. `additionalProperties: true` keeps an
    object open, and so does a schema in which parts are joined."""
    schema = _without_bad_names(schema)
    schema = _spelled_out(schema, schema)
    if any(_is_joined(part) for part in _parts(schema)):
        return dict(schema)
    return _closed_object(schema)


def _without_bad_names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Without an `$id` that is no URI and to which nothing can refer: programs write titles there.
    Nor with the `$schema` that stands for the newest dialect, which is meant without it, too."""
    name, dialect = schema.get("$id"), schema.get("$schema")
    left_out = set()
    if isinstance(name, str) and not _REFERENCE.fullmatch(name):
        left_out.add("$id")
    if isinstance(dialect, str) and _NEWEST.fullmatch(dialect):
        left_out.add("$schema")
    return {word: value for word, value in schema.items() if word not in left_out}


def _spelled_out(schema: Any, root: Mapping[str, Any]) -> Any:
    """With what grammars do not know said by what they know: items that must differ, names
    of properties, days of February, the length of a host's name."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for word, value in schema.items():
        if word in (*_NAMED, "dependentSchemas") and isinstance(value, Mapping):
            made[word] = {name: _spelled_out(one, root) for name, one in value.items()}
        elif word in (*_LISTED, "allOf", "oneOf") and isinstance(value, list):
            made[word] = [_spelled_out(one, root) for one in value]
        elif word in (*_SINGLE, "not", "if", "then", "else"):
            made[word] = _spelled_out(value, root)
    return unique_items(property_names(exact_format(made), root), root)


def _is_joined(schema: Mapping[str, Any]) -> bool:
    if _JOINING & set(schema):
        return True
    others = {word for word in schema if word not in _ANNOTATIONS and not word.startswith("x-")}
    return len(others) > 1 and bool(others & {"$ref", "anyOf"})


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it."""
    yield schema
    for inner in _inner(schema):
        yield from _parts(inner)


def _inner(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    found: list[Any] = [schema.get(word) for word in _SINGLE]
    for word in _NAMED:
        if isinstance(named := schema.get(word), Mapping):
            found += named.values()
    for word in _LISTED:
        if isinstance(listed := schema.get(word), list):
            found += listed
    return (one for one in found if isinstance(one, Mapping))


def _closed(schema: Any) -> Any:
    return _closed_object(schema) if isinstance(schema, Mapping) else schema


def _closed_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    for word in _SINGLE:
        if word in made:
            made[word] = _closed(made[word])
    for word in _NAMED:
        if isinstance(named := made.get(word), Mapping):
            made[word] = {name: _closed(one) for name, one in named.items()}
    for word in _LISTED:
        if isinstance(listed := made.get(word), list):
            made[word] = [_closed(one) for one in listed]
    if _names_all(schema):
        made["additionalProperties"] = False
    return made


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether a value can do with the properties that are named."""
    named = schema.get("properties")
    if not isinstance(named, Mapping):
        return False
    if any(word in schema for word in _OF_OTHERS):
        return False
    required = schema.get("required", [])
    return isinstance(required, list) and all(name in named for name in required)
