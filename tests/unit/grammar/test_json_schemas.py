"""Objects without unnamed properties, and schemas that must stay as they are (G01)."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest

from manyroots.errors import RequestError
from manyroots.grammar.checks import check_structure
from manyroots.grammar.json_schemas import closed
from manyroots.grammar.spelled_out import WITHOUT_LOOK_AHEAD
from manyroots.structured_outputs import StructuredOutputsParams
from tests.helpers.schemas import schema
from tests.helpers.seeded import Draw, for_seeds
from tests.unit.grammar.tiny_grammars import cache

MAIL, DECIMAL = WITHOUT_LOOK_AHEAD
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


@pytest.mark.parametrize("seed", range(40))
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


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ({"type": "integer"}, "uniqueItems"),
        ({"enum": [1, 1.0]}, "uniqueItems"),
        ({"enum": list("abcdefgh")}, "109601 lists.*smaller maxItems"),
    ],
)
def test_g01_items_that_must_differ_are_refused_by_name(items: Any, told: str) -> None:
    """Where there is no end to them, or too many lists."""
    wanted = {"type": "array", "items": items, "uniqueItems": True}
    with pytest.raises(RequestError, match=told):
        check_structure(StructuredOutputsParams(json=wanted))


@functools.cache
def _compiled(wanted: str) -> Any:
    return cache().compile(StructuredOutputsParams(json=json.loads(wanted)))


def _follows(wanted: dict[str, Any], text: str) -> bool:
    matcher = _compiled(json.dumps(wanted)).start()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return bool(taken == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("items", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, ["[]", '["a"]', '["b", "a"]'], ['["a", "a"]', '["c"]']),
        ({"type": "boolean"}, ["[true]", "[false,true]"], ["[true,true]", "[false,true,false]"]),
        (
            {"type": "integer", "minimum": -1, "maximum": 1},
            ["[0,-1]", "[1,0,-1]"],
            ["[0,0]", "[2]"],
        ),
        ({"$ref": "#/$defs/c"}, ['["x","y"]'], ['["x","x"]']),
    ],
)
def test_g01_items_of_few_values_differ(items: Any, good: list[str], bad: list[str]) -> None:
    """G01: every list of different items, and no other, in any property."""
    lists = {"type": "array", "items": items, "uniqueItems": True}
    wanted = {
        "$defs": {"c": {"type": "string", "enum": ["x", "y"], "title": "C"}},
        "type": "object",
        "properties": {"p": lists},
        "required": ["p"],
    }
    for text in (*good, *bad):
        body = f'{{"p":{text}}}'
        assert is_valid(json.loads(body), wanted) == (text in good)
        assert _follows(wanted, body) == (text in good), text
    limited = {**lists, "minItems": 1, "maxItems": 1, "$defs": wanted["$defs"]}
    assert _follows(limited, good[-1]) == (len(json.loads(good[-1])) == 1)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28", "2023-04-30", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "2023-13-01", "2023-1-01"],
        ),
        ("date-time", ["2024-02-29T23:59:60Z"], ["2023-02-29T10:00:00Z", "2024-02-29T24:00:00Z"]),
        (
            "hostname",
            ["a", "a-b.c", "a" * 63 + ".b", ".".join(["a" * 62] * 4)],
            ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["a" * 60] * 5), ""],
        ),
    ],
)
def test_g01_formats_are_exact(name: str, good: list[str], bad: list[str]) -> None:
    """G01: a date's days, in leap years and others; the form and the length of a host's name."""
    wanted = {"type": "string", "format": name}
    assert [text for text in (*good, *bad) if _follows(wanted, json.dumps(text))] == good


@pytest.mark.parametrize("name", ["password", "binary", "path"])
def test_g01_formats_that_any_string_has_are_accepted(name: str) -> None:
    """G01: what OpenAPI and pydantic write for secrets, bytes and paths."""
    assert _follows({"type": "string", "format": name}, '"a b"')


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"type": "string", "description": "a word"}, {"x": 1, "a": 2}, {"x": "1"}),
        ({"enum": ["a", "b"]}, {"b": 1}, {"x": 1}),
        ({"$ref": "#/$defs/letter"}, {"a": 1, "b": 2}, {"c": 1}),
    ],
)
def test_g01_records_whose_names_are_told(names: Any, good: Any, bad: Any) -> None:
    """G01: as zod writes them, and pydantic dictionaries with an enumeration as keys."""
    wanted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"letter": {"type": "string", "enum": ["a", "b"]}},
        "type": "object",
        "properties": {
            "counts": {
                "type": "object",
                "propertyNames": names,
                "additionalProperties": {"type": "integer"},
            }
        },
        "required": ["counts"],
    }
    for value in (good, {}):
        assert is_valid({"counts": value}, wanted)
        assert _follows(wanted, json.dumps({"counts": value}))
    assert not is_valid({"counts": bad}, wanted)
    assert not _follows(wanted, json.dumps({"counts": bad}))


@pytest.mark.parametrize("pattern", WITHOUT_LOOK_AHEAD)
@for_seeds(20)
def test_g01_patterns_without_their_look_ahead_match_the_same(draw: Draw, pattern: str) -> None:
    other = WITHOUT_LOOK_AHEAD[pattern]
    for _ in range(200):
        text = "".join(draw.choice("a0.-+'_@") for _ in range(draw.integer(0, 8)))
        for whole in (text, f"{text}@a.bc", f"a@{text}.bc"):
            assert bool(re.search(pattern, whole)) is bool(re.search(other, whole)), whole


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"format": "email", "pattern": MAIL}, ["a.b+c@d-e.fg"], ["a..b@c.de", ".a@b.cd", "a@b"]),
        ({"pattern": DECIMAL}, ["12.50", "-.5", "+007", "3."], ["", "-", ".", "1e3", "1.2.3"]),
    ],
)
def test_g01_addresses_and_decimals_as_programs_write_them(
    wanted: Any, good: list[str], bad: list[str]
) -> None:
    """G01: `z.email()` and pydantic's `Decimal`."""
    strings = {"type": "string", **wanted}
    assert [text for text in (*good, *bad) if _follows(strings, json.dumps(text))] == good
