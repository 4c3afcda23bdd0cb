"""JSON schemas drawn by seed, of many features; and some that have to be refused.

Texts are kept short, so that even a model that draws at random comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.seeded import Draw

Schema = dict[str, Any]
FORMATS = ("date", "email", "ipv4", "uuid", "ipv6")
PATTERNS = (r"^[a-z]{1,4}$", r"^\d{2}-\d{2}$", r"^(yes|no)$", r"^[A-F0-9]{4}$", r"^x+y?$")
WORDS = ("name", "age", "city", "tags", "size", "ok", "id", "when", "größe", "a b", 'q"t')


def schema(draw: Draw, depth: int = 2) -> Schema:
    """Any that can be honoured; an object at the top, as most callers want it."""
    if depth == 2 and draw.random() < 0.7:
        return _object(draw, depth)
    kinds = _LEAVES if depth == 0 else _LEAVES + _NESTED
    made: Schema = draw.choice(kinds)(draw, depth)
    return made


def _string(draw: Draw, _: int) -> Schema:
    match draw.randrange(4):
        case 0:
            return {"type": "string", "format": draw.choice(FORMATS), "maxLength": 40}
        case 1:
            return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 8}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}


def _integer(draw: Draw, _: int) -> Schema:
    least = draw.randint(-300, 300)
    made: Schema = {"type": "integer", "minimum": least, "maximum": least + draw.randint(3, 500)}
    if draw.flag():
        made["exclusiveMaximum"] = made.pop("maximum") + 1
    if draw.random() < 0.3:
        return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": draw.choice((2, 5))}
    return made


def _number(draw: Draw, _: int) -> Schema:
    made: Schema = {"type": "number", "minimum": draw.randint(-5, 5)}
    made["maximum"] = made["minimum"] + draw.randint(1, 50)
    if draw.random() < 0.8:  # else there are as many digits as a model likes
        made["multipleOf"] = draw.choice((0.5, 0.25))
    return made


def _simple(draw: Draw, _: int) -> Schema:
    return {"type": draw.choice(("boolean", "null"))}


def _enum(draw: Draw, _: int) -> Schema:
    values = [draw.choice(WORDS), draw.randint(-5, 5), None, True, {"a": [1]}, "é\n"]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, len(values)))}


def _types(draw: Draw, _: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": draw.randint(1, 99)}


def _object(draw: Draw, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 4))
    made: Schema = {
        "type": "object",
        "properties": {name: schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }
    if draw.random() < 0.2:
        made["required"] = names
        made["minProperties"] = len(names) - 1
    if draw.random() < 0.04:  # as many as a model likes
        made["patternProperties"] = {"^z[0-9]$": {"type": "boolean"}}
    if draw.random() < 0.2:
        made["additionalProperties"] = schema(draw, 0)
        made["required"] = names  # else this can't be counted
        made["maxProperties"] = len(names) + 1
    if draw.random() < 0.3:
        made |= {"title": "a title", "description": "what it is", "$comment": "c"}
    return made


def _array(draw: Draw, depth: int) -> Schema:
    if draw.random() < 0.3:
        items = [schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = draw.randint(0, 2)
    most = least + draw.randint(0, 2)
    return {
        "type": "array", "items": schema(draw, depth - 1), "minItems": least, "maxItems": most,
    }  # fmt: skip


def _any_of(draw: Draw, depth: int) -> Schema:
    return {"anyOf": [schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _one_of(draw: Draw, depth: int) -> Schema:
    """Told apart by their type."""
    choices = [_integer(draw, 0), _string(draw, 0), _array(draw, depth), {"type": "boolean"}]
    return {"oneOf": draw.sample(choices, draw.randint(1, 4))}


def _all_of(draw: Draw, _: int) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": draw.randint(3, 99)}]}


def _refs(draw: Draw, depth: int) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": schema(draw, 0),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    if depth < 2:  # a reference leads from the top
        return schema(draw, depth - 1)
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


Make = Callable[[Draw, int], Schema]
_LEAVES: list[Make] = [_string, _integer, _number, _simple, _enum, _types]
_NESTED: list[Make] = [_object, _array, _any_of, _one_of, _all_of, _refs]

REFUSED: list[Schema] = [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "not": {"required": ["a"]}},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"type": "string", "format": "made-up"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": r"(a)\1"},
    {"type": "wizard"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "https://json-schema.org/draft/2020-12/schema"},
]
"""Each has something that can't be honoured."""
