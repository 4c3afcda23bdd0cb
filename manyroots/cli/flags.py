"""Flags made from settings: one flag per field, so that the two can't drift apart.

Where a value is given more than once, the command line wins over the --config file, and that
over the environment and the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manyroots.config import ENGINE_ROOMS
from manyroots.errors import ConfigError
from manyroots.options import flag_name, type_fault


def add_settings(parser: argparse.ArgumentParser, cls: type[Any], title: str) -> None:
    """One flag for each field of a settings class. Flags not given stay out of the result."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        if spec.name == "model":
            continue  # the positional argument
        is_many = typing.get_origin(hints[spec.name]) is tuple
        # What many values are made of is for the settings to say; flags pass their words on.
        kind = str if is_many else _plain_type(hints[spec.name])
        given: Any = spec.default
        words = spec.metadata["words"]
        default = (" ".join(given) or "none") if is_many else _spelled(given, words)
        help_text = f"{spec.metadata['help']} [{default}]".replace("%", "%%")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
        if is_many:
            options |= {"nargs": "+", "action": _Extend, "metavar": _METAVARS[spec.name]}
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _WordOr(kind, words) if words else kind
            options["metavar"] = spec.name.split("_")[-1].upper()
        if spec.metadata["choices"]:
            options["choices"] = spec.metadata["choices"]
            del options["metavar"]
        group.add_argument(flag_name(spec.name), **options)


_METAVARS = {
    "kv_connectors": "NAME",
    "lora_modules": "NAME=FOLDER",
    "lora_target_modules": "MODULE",
    "lora_dirs": "FOLDER",
    "lora_source": "PREFIX",
    "weights_dirs": "FOLDER",
    "allowed_origins": "ORIGIN",
    "allowed_methods": "METHOD",
    "allowed_headers": "HEADER",
}


def _spelled(value: Any, words: Mapping[str, Any]) -> Any:
    """A default as a user would give it."""
    return next((word for word, meant in words.items() if meant == value), value)


class _WordOr:
    """Reads a flag's value, or one of the words that may stand for one."""

    def __init__(self, kind: type[Any], words: Mapping[str, Any]) -> None:
        self._kind = kind
        self._words = words
        self.__name__ = " or ".join([kind.__name__, *words])  # as argparse's errors call it

    def __call__(self, text: str) -> Any:
        return self._words[text] if text in self._words else self._kind(text)


class _Extend(argparse.Action):
    """A flag that may be given several times, each with several values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        # argparse's own "extend" would not start from an absent value.
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS,
        help="Folder, .gguf file, hub id or gemma3-270m; default: SmolLM2-135M-Instruct.",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE.yaml", help="Read flags from this file, by name.")
    for room, cls in ENGINE_ROOMS.items():
        add_settings(parser, cls, room)


def engine_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are settings of the engine."""
    names = {spec.name for cls in ENGINE_ROOMS.values() for spec in dataclasses.fields(cls)}
    return {name: value for name, value in arguments.items() if name in names}


def with_config_file(
    arguments: Mapping[str, Any], rooms: Iterable[type[Any]], *, more: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments, completed from the file that --config names, which may hold the fields of `rooms`
    and `more`."""
    path = arguments.get("config")
    given = {name: value for name, value in arguments.items() if name != "config"}
    if path is None:
        return given
    return {**_read_file(Path(path), rooms, more), **given}


@contextmanager
def naming_file(arguments: Mapping[str, Any], rooms: Iterable[type[Any]]) -> Iterator[None]:
    """Errors about what only the --config file says name the file."""
    try:
        yield
    except ConfigError as error:
        flag = re.match(r"--([a-z-]+)", str(error))
        name = flag[1].replace("-", "_") if flag else ""
        path = arguments.get("config")
        if path is None or name in arguments or name not in _read_file(Path(path), rooms):
            raise
        raise ConfigError(f"--config {path}: {error}") from error


def _meant(unknown: Iterable[str], known: Collection[str]) -> str:
    """The nearest names, for those that have one."""
    found = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
    pairs = [f"{near[0]} for {name}" for name, near in found.items() if near]
    return f"; did you mean {', '.join(pairs)}?" if pairs else ""


def unique_keys_loader() -> type[Any]:
    """YAML's safe loader, which refuses a key that is given twice: its last value would win
    silently."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice; give it once", key.start_mark
                )
            seen.add(name)
        return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def _read_file(
    path: Path, rooms: Iterable[type[Any]], more: Collection[str] = ()
) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.load(path.read_text(), Loader=unique_keys_loader())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} can't be read: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold 'flag: value' lines at its top level.")
    values = {str(name).replace("-", "_"): value for name, value in loaded.items()}
    by_name = {spec.name: room for room in rooms for spec in dataclasses.fields(room)}
    unknown = sorted(set(values) - set(by_name) - set(more))
    if unknown:
        raise ConfigError(
            f"--config {path} names {', '.join(unknown)}, which no flag is called"
            f"{_meant(unknown, {*by_name, *more})}. See `manyroots serve --help`."
        )
    for name, value in values.items():
        if name in by_name and (fault := type_fault(by_name[name], name, value)):
            raise ConfigError(f"--config {path}: {name} is {value!r}; it must be {fault}.")
    return values


def _plain_type(hint: Any) -> type[Any]:
    """`int | None` is `int` on the command line."""
    if isinstance(hint, types.UnionType):
        [hint] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    assert isinstance(hint, type)
    return hint
