"""What shape a completion must have, as a caller asks for it.

Takes one of a JSON schema, a regular expression, a list of choices or a grammar; gives frozen plain
values that cross between processes. Whether they can be honoured is `grammar/`'s to say.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manyroots.errors import RequestError

MAX_CHOICES_OF_TEXT = 4096
MAX_CHARACTERS = 1 << 20

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five. Names are those that vLLM's users know."""

    json: str | None = None
    """A JSON schema: its text, or a mapping, which becomes its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """Matched by the whole completion."""
    choice: tuple[str, ...] | None = None
    """The completion is one of these."""
    grammar: str | None = None
    """Lark, or GBNF with `root ::=`."""
    prefix: str | None = None
    """What may come before the structure, as the Lark rule `prefix` and what it needs: a model's
    reasoning. None for nothing."""
    instead: str | None = None
    """What may stand in place of all that, as the Lark rule `instead` and what it needs (which may
    be the rule `prefix`): calls of tools. None for nothing."""
    asked_as: str = field(default="structured_outputs", compare=False)
    """What the caller's field is called, for errors."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            told = " and ".join(given) or "none of them"
            raise RequestError(
                f"structured_outputs has {told}; give exactly one of {', '.join(KINDS)}.",
                field="structured_outputs",
            )
        [kind] = given
        value = getattr(self, kind)
        if kind == "json":
            self._set("json", _schema(value))
        elif kind == "choice":
            self._set("choice", _choices(value))
        elif kind == "json_object":
            if value is not True:
                raise _wrong(kind, value, "true")
        elif not isinstance(value, str):
            raise _wrong(kind, value, "a string")
        elif len(value) > MAX_CHARACTERS:
            raise _too_long(kind, len(value))

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _schema(value: Any) -> str:
    if isinstance(value, Mapping):
        try:
            value = json_text.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"structured_outputs.json can't be written as JSON: {error}.",
                field="structured_outputs",
            ) from error
    if not isinstance(value, str):
        raise _wrong("json", value, "a JSON schema, as an object or as its text")
    if len(value) > MAX_CHARACTERS:
        raise _too_long("json", len(value))
    return value


def _choices(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    choices = tuple(value) if is_list else ()
    if not choices or not all(isinstance(item, str) and item for item in choices):
        raise _wrong("choice", value, "a list of strings, none of them empty")
    if len(choices) > MAX_CHOICES_OF_TEXT:
        raise RequestError(
            f"structured_outputs.choice has {len(choices)} entries; at most "
            f"{MAX_CHOICES_OF_TEXT} are allowed.",
            field="structured_outputs",
        )
    if (length := sum(map(len, choices))) > MAX_CHARACTERS:
        raise _too_long("choice", length)
    return choices


def _wrong(kind: str, value: Any, wanted: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind} is {repr(value)[:60]}; it must be {wanted}.",
        field="structured_outputs",
    )


def _too_long(kind: str, length: int) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind} has {length} characters; at most {MAX_CHARACTERS} are allowed.",
        field="structured_outputs",
    )
