"""JSON from strangers: bounded, one meaning only. Duplicate names and NaN are refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from manyroots.errors import AdapterError


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `raw`; `what` is how errors call it."""
    try:
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{what} is not valid JSON ({_reason(error)}); save the adapter again."
        ) from error
    if not isinstance(parsed, dict):
        raise AdapterError(f"{what} must be a JSON object; save the adapter again.")
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:200]!r} is there twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)[:300]
