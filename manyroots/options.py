"""What a setting is made of: a field that is also a flag, and values of the right kind for it.

Takes a settings class and values as a user gives them (flags, a YAML file, keyword arguments);
gives the fields' values, or what they must be instead, in words that name the flag.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

from manyroots.adapter_names import LoraModule, lora_modules
from manyroots.errors import ConfigError

T = TypeVar("T")

_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def option(
    default: T,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    flag: str = "",
    words: Mapping[str, T] = types.MappingProxyType({}),
) -> T:
    """A field that is also a command-line flag. `words`: what may be given in place of a value,
    and the value that each stands for."""
    metadata = {"help": help, "choices": choices, "flag": flag, "words": words}
    return field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def at_least(settings: Any, name: str, low: int) -> None:
    value = getattr(settings, name)
    if value is not None and value < low:
        raise ConfigError(f"{flag_name(name)} is {value}; it must be at least {low}.")


def check_choices(settings: Any) -> None:
    for spec in dataclasses.fields(settings):
        choices = spec.metadata.get("choices", ())
        value = getattr(settings, spec.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{flag_name(spec.name)} is {value!r}; choose one of {', '.join(choices)}."
            )


def type_fault(room: type[Any], name: str, value: object) -> str | None:
    """What a field must hold instead of `value`, in words; None if that is of the right kind.

    What a flag's word would be turned into must be given as it is: no text for a number, and no
    number for a text, since a key of 0123 would be another one.
    """
    hint = typing.get_type_hints(room)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    [spec] = [spec for spec in fields(room) if spec.name == name]
    if value is None:
        # An empty line in a file; for a tuple it is an empty one.
        return None if type(None) in kinds or typing.get_origin(hint) is tuple else _wanted(kinds)
    if typing.get_origin(hint) is tuple:
        holds_modules = LoraModule in typing.get_args(hint)
        if _is_many(value, str | LoraModule | Mapping if holds_modules else str):
            return None
        each = "name=folder, or name and path" if holds_modules else "text"
        return f"a list, each entry {each}"
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return None
    words = spec.metadata["words"]
    if type(value) is str and value in words:
        return None
    if not any(type(value) is kind for kind in kinds):
        return " or ".join([_wanted(kinds), *words])
    choices = spec.metadata["choices"]
    return f"one of {', '.join(choices)}" if choices and value not in choices else None


def _wanted(kinds: Iterable[Any]) -> str:
    [kind] = [kind for kind in kinds if kind is not type(None)]
    return _KINDS.get(kind, "text; put it in quotes")


def _is_many(value: object, entry: Any) -> bool:
    """Whether `as_field` can make many of it, each an `entry`."""
    if isinstance(value, entry):
        return True
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return is_list and all(isinstance(item, entry) for item in value)  # type: ignore[attr-defined]


def as_field(room: type[Any], name: str, value: object) -> object:
    """Fields that hold many values may be given as one, or as any kind of list; others by a word
    that stands for a value."""
    hint = typing.get_type_hints(room)[name]
    if typing.get_origin(hint) is not tuple:
        [spec] = [spec for spec in fields(room) if spec.name == name]
        return spec.metadata["words"].get(value, value) if isinstance(value, str) else value
    if value is None:
        return ()
    many = [value] if isinstance(value, str | LoraModule | Mapping) else value
    if not isinstance(many, Iterable):
        raise ConfigError(f"{flag_name(name)} is {value!r}; it must be a list.")
    holds_modules = LoraModule in typing.get_args(hint)
    return lora_modules(many) if holds_modules else tuple(str(item) for item in many)
