"""What every bench's command shares: its parser, checks of its numbers, and the report's way to a
file."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from manyroots.cli.flags import add_engine_flags, with_config_file
from manyroots.config import ENGINE_ROOMS
from manyroots.errors import ConfigError
from manyroots.options import flag_name

Number = TypeVar("Number", int, float)
Report = dict[str, Any]


def add_bench(
    kinds: Any,
    name: str,
    run: Callable[[dict[str, Any]], Report],
    *,
    has_engine: bool = False,
    is_failure: Callable[[Report], bool] = lambda report: False,
    **texts: str,
) -> Any:
    """A command that prints the report that `run` makes of its flags, and writes it to --json.
    Gives the group for the flags of its workload. `has_engine`: it takes the engine's flags, too.
    `is_failure`: whether a report ends the command with code 1."""

    def run_command(arguments: dict[str, Any]) -> int:
        values = arguments
        if has_engine:
            values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
        report = run(values)
        _write(report, values["json"])
        return int(is_failure(report))

    parser = kinds.add_parser(name, **texts)
    if has_engine:
        add_engine_flags(parser)
    parser.set_defaults(run=run_command)
    group = parser.add_argument_group("workload")
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    return group


def report_file(text: str) -> str:
    """What --json names; refused before hours are measured that it could not hold."""
    path = Path(text).absolute()
    if path.is_dir():
        raise ConfigError(f"--json is {text!r}, a folder; name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(f"--json is {text!r}, and there is no folder {path.parent}; make it.")
    return text


def add_layers(group: Any) -> None:
    """Beside --model-config."""
    group.add_argument(
        "--layers", type=int, default=None, metavar="N",
        help="only the first N layers: to compile kernels, or to try a case",
    )  # fmt: skip


def check_layers(values: dict[str, Any]) -> None:
    if values["layers"] is not None:
        check_at_least("layers", values["layers"], 1)
        if values["model_config"] is None:
            raise ConfigError("--layers is of --model-config alone; name one, or leave it out.")


def _write(report: Report, path: str | None) -> None:
    """Write the report where asked, saying what it was measured on."""
    if path is not None:
        if "machine" not in report:
            from manyroots.bench.machine import describe_machine

            report = {"machine": describe_machine(), **report}
        Path(path).write_text(json.dumps(report, indent=2) + "\n")


def ints(text: str) -> tuple[int, ...]:
    """`16,64` on the command line."""
    return _list(text, int, "whole numbers, like 16,64")


def floats(text: str) -> tuple[float, ...]:
    """`0.5,2` on the command line."""
    return _list(text, float, "numbers, like 0.5,2")


def _list(text: str, kind: type[Number], wanted: str) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of {wanted}") from None


def range_of_ints(text: str) -> tuple[int, int]:
    """`64-1024` on the command line, or one number for both ends."""
    low, dash, high = text.partition("-")
    try:
        return int(low), int(high if dash else low)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no range of whole numbers, like 64-1024") from None


def check_positive(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        check_at_least(name, arguments[name], 1)


def check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{flag_name(name)} is {value}; it must be at least {low}.")


def check_range(name: str, low_high: tuple[int, int]) -> None:
    low, high = low_high
    if not 1 <= low <= high:
        raise ConfigError(
            f"{flag_name(name)} is {low}-{high}; give it as LOW-HIGH, the first at least 1 and the "
            "second not below it."
        )
