"""What JSON schemas say and the grammar library does not know, said by what it knows.

Takes one schema; gives one with the same values, or raises ValueError where that would be too long.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from manyroots.grammar.bounds import referred

MAX_LISTS = 1000
"""Lists of items that differ, all of which are written into the grammar."""
MAX_HOSTNAME = 253
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Formats that the library takes more widely: with a 29th of February in every year."""
_HOST = r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
WITHOUT_LOOK_AHEAD = {
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@{_HOST}": (
        rf"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@{_HOST}"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
}
"""The patterns that zod writes for addresses of mail and pydantic for decimals, and others that
match the same: look-ahead in general can't be had."""
_WITHOUT_SYNTAX = ("password", "binary", "path")
"""Formats that any string has: hints of OpenAPI and pydantic for programs that show or read it."""
_ANY_NAME: tuple[dict[str, Any], ...] = ({}, {"type": "string"})
_OF_LISTS = {"type", "items", "uniqueItems", "minItems", "maxItems"}
_SAID_BESIDE = {"title", "description", "default", "examples", "deprecated", "$comment"}


def exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Dates have the days of their month, and names of hosts a length."""
    if isinstance(pattern := schema.get("pattern"), str) and pattern in WITHOUT_LOOK_AHEAD:
        schema = {**schema, "pattern": WITHOUT_LOOK_AHEAD[pattern]}
    name = schema.get("format")
    if name in _WITHOUT_SYNTAX:
        return {word: value for word, value in schema.items() if word != "format"}
    if name in _PATTERNS and "pattern" not in schema:
        rest = {word: value for word, value in schema.items() if word != "format"}
        return {**rest, "pattern": _PATTERNS[name]}
    if name == "hostname":
        given = schema.get("maxLength", MAX_HOSTNAME)
        length = min(given, MAX_HOSTNAME) if isinstance(given, int) else given
        return {**schema, "maxLength": length}
    return schema


def property_names(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Names that may be any string say nothing, and names from a list are named: so zod and
    pydantic write records. `root`: what references are into."""
    wanted = schema.get("propertyNames")
    if not isinstance(wanted, Mapping):
        return schema
    rest = {word: value for word, value in schema.items() if word != "propertyNames"}
    if {word: wanted[word] for word in wanted if word not in _SAID_BESIDE} in _ANY_NAME:
        return rest
    names = _values(wanted, root)
    if names is None or "patternProperties" in schema:
        return schema
    others, given = schema.get("additionalProperties", True), schema.get("properties", {})
    named = {name: given.get(name, others) for name in names if isinstance(name, str)}
    return {**rest, "properties": named, "additionalProperties": False}


def unique_items(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Lists whose items must differ are one of all such lists, where their items are of few
    values. `root`: what references are into."""
    wanted = schema.get("uniqueItems")
    most = schema.get("maxItems")
    if wanted is False or (wanted is True and most in (0, 1)):
        return {word: value for word, value in schema.items() if word != "uniqueItems"}
    words = set(schema) - _SAID_BESIDE
    if wanted is not True or schema.get("type") != "array" or not words <= _OF_LISTS:
        return schema
    values = _values(schema.get("items"), root)
    if values is None:
        return schema
    least = schema.get("minItems", 0)
    lengths = range(least, min(len(values), len(values) if most is None else most) + 1)
    num_lists = sum(math.perm(len(values), length) for length in lengths)
    if num_lists > MAX_LISTS:
        raise ValueError(
            f"uniqueItems: {len(values)} values make {num_lists} lists of different items; at most "
            f"{MAX_LISTS} can be told apart. Give a smaller maxItems, or leave uniqueItems out."
        )
    lists = [list(one) for length in lengths for one in itertools.permutations(values, length)]
    if not lists:
        raise ValueError(
            f"uniqueItems: minItems is {least}, and the items have {len(values)} values."
        )
    return {"enum": lists}


def _values(items: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """All values of an item; None where they are no short list."""
    for _ in range(8):
        if not isinstance(items, Mapping) or set(items) - _SAID_BESIDE != {"$ref"}:
            break
        items = referred(str(items["$ref"]), root)
    if not isinstance(items, Mapping):
        return None
    words = set(items) - _SAID_BESIDE
    if words <= {"type", "enum"} and isinstance(items.get("enum"), list):
        if "type" in words and items["type"] != "string":
            return None
        found = {json.dumps(value, sort_keys=True): value for value in items["enum"]}
        if "type" in words or all(isinstance(value, str) for value in found.values()):
            return [value for value in found.values() if isinstance(value, str)]
        return None
    if words == {"const"}:
        return [items["const"]]
    if words == {"type"} and items["type"] == "boolean":
        return [True, False]
    if words == {"type", "minimum", "maximum"} and items["type"] == "integer":
        low, high = items["minimum"], items["maximum"]
        if type(low) is type(high) is int and 0 <= high - low < MAX_LISTS:
            return list(range(low, high + 1))
    return None
