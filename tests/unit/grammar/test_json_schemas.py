"""Objects without properties that nobody named, and schemas that must stay as they are (G01)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from manyroots.grammar.json_schemas import closed
from manyroots.structured_outputs import StructuredOutputsParams
from tests.schemas import schema
from tests.seeded import Draw
from tests.unit.grammar.tiny_grammars import cache

COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "is_warm": {"type": "boolean"}},
    "required": ["name"],
}


def is_valid(value: Any, wanted: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(wanted).is_valid(value))


def test_g01_an_object_has_the_properties_that_are_named() -> None:
    made = closed(COLOUR)
    assert is_valid({"name": "red", "is_warm": True}, made)
    assert not is_valid({"name": "red", "is_warm_blue_green": True}, made)
    assert COLOUR.keys() == {"type", "properties", "required"}  # what was given stays


def test_g01_objects_are_closed_wherever_they_are() -> None:
    nested = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "anyOf": [{"type": "array", "items": COLOUR}, {"$ref": "#/$defs/node"}, COLOUR],
    }
    made = closed(nested)
    for open_value in ([{"name": "red", "x": 1}], {"next": {"next": {"x": 1}}}):
        assert is_valid(open_value, nested)
        assert not is_valid(open_value, made)
    assert is_valid({"next": {"next": {}}}, made)


@pytest.mark.parametrize(
    "kept",
    [
        COLOUR | {"additionalProperties": True},
        COLOUR | {"additionalProperties": {"type": "integer"}},
        COLOUR | {"patternProperties": {"^z": {"type": "integer"}}},
        COLOUR | {"required": ["name", "other"]},
        COLOUR | {"minProperties": 3},
        {"type": "object"},
        {"allOf": [COLOUR, {"properties": {"other": {}}, "required": ["other"]}]},
        {"oneOf": [COLOUR, {"properties": {"other": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"$defs": {"c": COLOUR}, "$ref": "#/$defs/c", "properties": {"other": {}}},
    ],
)
def test_g01_what_must_stay_open_stays_as_it_is(kept: dict[str, Any]) -> None:
    assert closed(kept) == kept


def test_g01_a_property_may_be_called_like_a_keyword() -> None:
    wanted = {"properties": {"not": {"type": "integer"}, "allOf": {"type": "integer"}}}
    assert closed(wanted)["additionalProperties"] is False


@pytest.mark.parametrize("seed", range(100))
def test_g01_what_can_be_honoured_can_be_honoured_closed(seed: int) -> None:
    made = _without(schema(Draw(seed)), "additionalProperties")
    check_structure(StructuredOutputsParams(json=made))


def _without(value: Any, word: str) -> Any:
    if isinstance(value, list):
        return [_without(one, word) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without(one, word)
        for name, one in value.items()
        if not (name == word and one is False)
    }


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{ "a" : 1, "b": [ 1, 2 ] }', True),
        (json.dumps({"a": 1, "b": [1, 2]}, indent=4), True),
        (json.dumps({"a": 1, "b": [1, 2]}, indent="\t").replace("\n", "\r\n"), True),
        ('{\n\n"a": 1, "b": []}', False),
        ('{"a":\n\n\n1, "b": []}', False),
        ('{"a":     1, "b": []}', False),
    ],
)
def test_g01_white_space_is_layout(text: str, is_allowed: bool) -> None:
    """Empty lines have no end in a small model."""
    numbers = {"type": "array", "items": {"type": "integer"}}
    wanted = {"type": "object", "properties": {"a": {"type": "integer"}, "b": numbers}}
    matcher = cache().compile(StructuredOutputsParams(json=wanted)).start()
    tokens = list(text.encode())
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_allowed


@pytest.mark.parametrize("wraps", [lambda one: one, lambda one: {"allOf": [one]}])
def test_g01_items_that_need_not_differ_are_accepted(wraps: Any) -> None:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}
    named = {"type": "object", "properties": {"uniqueItems": items, "b": False}}
    for wanted in (items, named):
        check_structure(StructuredOutputsParams(json=wraps(wanted)))
    assert closed(named)["properties"]["uniqueItems"] == {k: items[k] for k in ("type", "items")}


def test_g01_items_that_must_differ_are_refused_by_name() -> None:
    wanted = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems"):
        check_structure(StructuredOutputsParams(json=wanted))
