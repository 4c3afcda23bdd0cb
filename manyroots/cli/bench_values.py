"""What every bench's command shares: checks of its numbers, and the report's way to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyroots.errors import ConfigError
from manyroots.options import flag_name


def written(report: dict[str, Any], path: str | None) -> int:
    """Write the report where asked, saying what it was measured on."""
    if path is not None:
        if "machine" not in report:
            from manyroots.bench.machine import describe_machine

            report = {"machine": describe_machine(), **report}
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def ints(text: str) -> tuple[int, ...]:
    """`16,64` on the command line."""
    return tuple(int(part) for part in text.split(","))


def floats(text: str) -> tuple[float, ...]:
    """`0.5,2` on the command line."""
    return tuple(float(part) for part in text.split(","))


def range_of_ints(text: str) -> tuple[int, int]:
    """`64-1024` on the command line, or one number for both ends."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


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
