"""JSON from strangers: bounded, one meaning only. Duplicate names and NaN are refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from manyroots.errors import AdapterError


def parse_object(
    raw: bytes, what: str, made: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """The JSON object in `raw`; `what` is how errors call it.

    `made` turns each object, inner ones first, into what stands for it; it must leave the
    outermost a dict.
    """

    def checked(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"{_twice(pairs)[:200]!r} is there twice")
        return found if made is None else made(found)

    try:
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=checked, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{what} is not valid JSON ({_reason(error)}); save the adapter again."
        ) from error
    if not isinstance(parsed, dict):
        raise AdapterError(f"{what} must be a JSON object; save the adapter again.")
    return parsed


def _twice(pairs: list[tuple[str, Any]]) -> str:
    return next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)[:300]
