"""How deep and how wide a schema or a grammar may be.

Takes schemas and grammars before `llguidance` sees them; raises ValueError with the value and the
remedy. The library recurses on the native stack along references, rules and nesting: a chain of
some thousands ends its process. Everything here is iterative, and linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 1024
"""Schemas or rules on one path, each reference followed once. 8 MiB of stack hold about 1,200 of
the costliest kind; the threads that compile have 64 MiB and more."""
MAX_OPTIONAL = 500
"""Optional properties of an object in which none is required. A position of the text has four
alternatives for each, and llguidance follows at most 2,000."""
MAX_OPTIONAL_BESIDE_REQUIRED = 2000

_TOKEN = re.compile(
    r"""//[^\n]*|\#[^\n]*             # comments
    |"(?:[^"\\\n]|\\.)*"              # strings
    |/(?:[^/\\\n]|\\.)+/[a-z]*        # regular expressions
    |%json(?=[^\w])|%\w+|[?!@]?[A-Za-z_]\w*|:|\n|\S""",
    re.VERBOSE,
)


def check_schema(schema: Any) -> None:
    """Refuse a schema that is too deep or too wide."""
    for part in _all_parts(schema):
        _check_width(part)
    _check_depth("schema", [schema], lambda part: _next_parts(part, schema))


def _check_width(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return
    names = set(map(str, required)) if isinstance(required, list) else set()
    num_optional = sum(name not in names for name in properties)
    limit = MAX_OPTIONAL_BESIDE_REQUIRED if len(names) else MAX_OPTIONAL
    if num_optional > limit:
        raise ValueError(
            f"an object has {num_optional} optional properties; at most {limit} are allowed. List "
            "more of them in required, or split the object."
        )


def _all_parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, itself included."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _next_parts(part: dict[str, Any] | list[Any], root: Any) -> list[Any]:
    """What is below a part of a schema, by nesting and by reference."""
    if isinstance(part, list):
        below = part
    else:
        # Definitions count where they are referred to.
        below = [value for word, value in part.items() if word not in ("$defs", "definitions")]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            below.append(referred(reference, root))
    return [item for item in below if isinstance(item, dict | list)]


def referred(reference: str, root: Any) -> Any:
    """What a reference within a schema is to; None where nothing is there."""
    found = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found


def _check_depth(what: str, roots: list[Any], below: Callable[[Any], list[Any]]) -> None:
    """A walk in depth that enters each part once, as the library does."""
    seen: set[int] = set()
    path = [iter(roots)]
    while path:
        part = next(path[-1], None)
        if part is None:
            path.pop()
        elif id(part) not in seen:
            seen.add(id(part))
            path.append(iter(below(part)))
            if len(path) > MAX_DEPTH:
                raise ValueError(
                    f"the {what} is more than {MAX_DEPTH} levels deep, references followed; "
                    "shorten its chains of references or nest less."
                )


def check_lark(text: str) -> None:
    """Refuse a Lark grammar whose rules refer to each other in too long a chain, or whose schemas
    (`%json`) are too deep."""
    rules = _rules(text)
    roots = list(rules.values())
    _check_depth("grammar", roots, lambda rule: [rules[name] for name in rule if name in rules])


def _rules(text: str) -> dict[str, list[str]]:
    """The names that each rule mentions, in order."""
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    at, is_first, pending = 0, True, ""
    while token := _TOKEN.search(text, at):
        at, word = token.end(), token[0]
        if pending:
            # A name that begins a line is a rule's if a colon, attributes or a priority follow it.
            if word in (":", "[", "."):
                body = rules.setdefault(pending, [])
            else:
                body.append(pending)
            pending = ""
        if word == "%json":
            at = _check_embedded(text, at)
        elif word[0].isalpha() or word[0] in "_?!@":
            name = word.lstrip("?!@")
            if is_first:
                pending = name
            else:
                body.append(name)
        is_first = word == "\n"
    body.append(pending)
    return rules


def _check_embedded(text: str, at: int) -> int:
    """Look at the schema after a `%json`; gives where it ends."""
    begin = text.find("{", at)
    if begin < 0 or text[at:begin].strip():
        return at  # no schema, as the library will say
    schema, end = json.JSONDecoder().raw_decode(text, begin)
    check_schema(schema)
    return end
