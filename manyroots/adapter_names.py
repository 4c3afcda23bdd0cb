"""Adapters as people name them: on the command line, in a config file, in Python.

Takes `name=folder`, JSON, mappings and `LoRARequest`s; gives `LoraModule`s. Looks at no file and
knows nothing of what is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from manyroots.errors import ConfigError

MAX_NAME_CHARACTERS = 128
MAX_COMBINED = 4
"""Adapters that one request may add up."""
MAX_WEIGHT = 100.0
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter's name, and the folder that has its files."""

    name: str
    path: str
    base_model_name: str | None = None
    """What `/v1/models` shows as its parent; the served model by default."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt is for, in Python. The arguments are in the order of vLLM's."""

    lora_name: str
    lora_int_id: int | None = None
    """Another number for a name than before says that its files are others now: they are read
    again. An adapter is known by its name, and its cache by its content."""
    lora_path: str = ""
    """The folder with its files; may be left out once the name is known. Another one than before
    gives the name what is there."""
    base_model_name: str | None = None
    """Accepted for the sake of existing scripts, without effect."""
    load_inplace: bool = False
    """Read the files again, whatever the name means now."""


def split_revision(model: str) -> tuple[str, str | None]:
    """A name, and the revision after its `@`; names have none in them."""
    name, at, revision = model.partition("@")
    return name, revision if at else None


class WeightedName(NamedTuple):
    """One of several adapters that are added up; the name may have `@` and a revision."""

    name: str
    weight: float


def name_combination(parts: Iterable[WeightedName]) -> str:
    """One name for all of them; adapters' own names have neither of its marks."""
    return "+".join(f"{name}*{weight!r}" for name, weight in parts)


def is_combination(name: str) -> bool:
    return "*" in name


def combined_names(name: str) -> list[WeightedName]:
    """What `name_combination` has put together."""
    split = [part.rpartition("*") for part in name.split("+")]
    return [WeightedName(part, float(weight)) for part, _, weight in split]


def name_fault(name: str) -> str | None:
    """What is wrong with a name, with the remedy; None if nothing is."""
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        return (
            f"the adapter name {name[:60]!r} has {len(name)} characters; "
            f"it must have from 1 to {MAX_NAME_CHARACTERS}."
        )
    # A slash is part of a hub's names, as in team/adapter. A colon would part the base from the
    # adapter, and the rest would have to be quoted in URLs, labels and logs.
    reads_as_path = ".." in name or bool({"", "."} & set(name.replace("\\", "/").split("/")))
    if _NAME.fullmatch(name) is None or reads_as_path:
        what = "reads like a path" if reads_as_path else "has other characters than are allowed"
        return (
            f"the adapter name {name!r} {what}; use letters (a to z), digits, '-', '_' and '.', "
            "and '/' between them."
        )
    return None


def lora_modules(given: Iterable[object]) -> tuple[LoraModule, ...]:
    """Adapters in any of the forms in which people write them."""
    return tuple(_lora_module(item) for item in given)


def _lora_module(item: object) -> LoraModule:
    if isinstance(item, LoraModule):
        return item
    if not isinstance(item, str):
        return _from_mapping(item, item)
    if item.lstrip().startswith("{"):
        try:
            return _from_mapping(json.loads(item), item)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--lora-modules has {item!r}, which is not JSON: {error}."
            ) from error
    name, equals, path = item.partition("=")
    if not equals or not name or not path:
        raise ConfigError(
            f"--lora-modules has {item!r}; write name=folder, or JSON as "
            '{"name": "...", "path": "..."}.'
        )
    return LoraModule(name, path)


def _from_mapping(value: object, written: object) -> LoraModule:
    known = {spec.name for spec in fields(LoraModule)}
    is_good = (
        isinstance(value, Mapping)
        and {"name", "path"} <= set(value) <= known
        and all(isinstance(value[key], str) and value[key] for key in ("name", "path"))
        and isinstance(value.get("base_model_name"), str | None)
    )
    if not is_good or not isinstance(value, Mapping):
        raise ConfigError(
            f"--lora-modules has {written!r}; it must have name and path, may have "
            "base_model_name, and nothing else; all of them are strings."
        )
    return LoraModule(**value)
