"""Trace files: one JSON object per line.

    {"arrival": 0.5, "prompt": [["system", 300], ["question-1", 40]], "adapter": "legal",
     "salt": "tenant-7", "output_tokens": 64, "n": 1, "reply": "answer-1", "ends_by": "stop",
     "retention": [{"until_token": 300, "priority": 50, "for_s": 600}]}

`prompt` holds token ids or [segment, length] pairs. `salt`, `n`, `reply`, `ends_by` and `retention`
may be left out; `adapter` may not, so that the base model is never simulated by mistake. Whatever
is wrong is refused with the file, the line and the field.

A file whose first line has `hash_ids` is in Mooncake's format (`mooncake.py`) from end to end, and
one whose first line has `page_size` is a server's trace of its own traffic (`page_trace.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from manyroots.engine.retention import SHARE, checked_ranges
from manyroots.errors import ConfigError, RequestError
from manyroots.messages import KeepRange, Retention
from manyroots.sampling import MAX_CHOICES, MAX_TOKENS_LIMIT
from manyroots.simulate.mooncake import is_mooncake, parse_mooncake
from manyroots.simulate.page_trace import is_page_trace, page_values, parse_page_line
from manyroots.simulate.trace import EndsBy, Trace, TraceRequest, TraceSegment

MAX_TOKEN_ID = 2**31 - 1
REQUIRED = ("arrival", "prompt", "adapter", "output_tokens")
OPTIONAL = ("salt", "n", "reply", "ends_by", "retention")
RANGE = ("until_token", "priority", "for_s")


def read_trace(path: Path, *, num_requests: int | None = None, every: int = 1) -> Trace:
    """The lines of a file, one of `every` of them, up to so many; blank ones are skipped. No more
    is read than is asked for."""
    try:
        with path.open(encoding="utf-8") as file:
            trace = tuple(islice(_lines(file, path), 0, _last(num_requests, every), every))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"trace {path} can't be read: {error}") from error
    if not trace:
        raise ConfigError(f"trace {path} holds no request; write one JSON object per line.")
    return trace


def _last(num_requests: int | None, every: int) -> int | None:
    return None if num_requests is None else (num_requests - 1) * every + 1


def _lines(file: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    parse: Callable[[dict[str, Any], str], TraceRequest] | None = None
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        values = _object(text, where)
        if parse is None:
            parse = _parser_of(values)
        yield parse(values, where)


def _parser_of(values: dict[str, Any]) -> Callable[[dict[str, Any], str], TraceRequest]:
    """By a file's first line."""
    if is_mooncake(values):
        return parse_mooncake
    return parse_page_line if is_page_trace(values) else parse_values


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    try:
        path.write_text("".join(format_line(line) + "\n" for line in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path} can't be written: {error}") from error


def format_line(line: TraceRequest) -> str:
    if line.whole:
        return json.dumps(page_values(line))
    values: dict[str, Any] = {
        "arrival": line.arrival_s,
        "prompt": [
            [part.name, part.length] if isinstance(part, TraceSegment) else part
            for part in line.prompt
        ],
        "adapter": line.adapter,
        "salt": line.salt,
        "output_tokens": line.output_tokens,
        "n": line.n,
        "reply": line.reply,
        "ends_by": line.ends_by.value,
    }
    if line.retention is not None:
        values["retention"] = [asdict(each) for each in line.retention.ranges]
    return json.dumps(values)


def parse_line(text: str, where: str) -> TraceRequest:
    """One line of our own format, checked; `where` begins every error message."""
    return parse_values(_object(text, where), where)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a JSON object like {{'arrival': 0.0, ...}}.")
    return values


def parse_values(values: dict[str, Any], where: str) -> TraceRequest:
    for name in REQUIRED:
        if name not in values:
            hint = "; give a name, or null for the base model" if name == "adapter" else ""
            raise ConfigError(f"{where}: {name} is missing{hint}.")
    unknown = sorted(set(values) - set(REQUIRED) - set(OPTIONAL))
    if unknown:
        known = ", ".join((*REQUIRED, *OPTIONAL))
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; a line may have {known}.")
    return TraceRequest(
        arrival_s=_arrival(values["arrival"], where),
        prompt=_prompt(values["prompt"], where),
        adapter=_name(values["adapter"], "adapter", where),
        salt=_text(values.get("salt"), "salt", where),
        output_tokens=_count(values["output_tokens"], "output_tokens", MAX_TOKENS_LIMIT, where),
        n=_count(values.get("n", 1), "n", MAX_CHOICES, where),
        reply=_name(values.get("reply"), "reply", where),
        ends_by=_ends_by(values.get("ends_by", "length"), where),
        retention=_retention(values.get("retention"), where),
    )


def _arrival(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"{where}: arrival is {value!r}; it must be a number of seconds, at least 0."
        )
    return float(value)


def _prompt(value: Any, where: str) -> tuple[int, ...] | tuple[TraceSegment, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where}: prompt must be a non-empty list of token ids or of [segment, length] pairs."
        )
    if isinstance(value[0], list):
        return tuple(_segment(part, f"prompt[{i}]", where) for i, part in enumerate(value))
    for i, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN_ID:
            raise ConfigError(
                f"{where}: prompt[{i}] is {token!r}; token ids are integers from 0 to "
                f"{MAX_TOKEN_ID}, and can't be mixed with segments."
            )
    return tuple(value)


def _segment(value: Any, field: str, where: str) -> TraceSegment:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise ConfigError(f"{where}: {field} is {value!r}; it must be a [segment, length] pair.")
    return TraceSegment(value[0], _count(value[1], f"{field}'s length", MAX_TOKENS_LIMIT, where))


def _count(value: Any, field: str, most: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{where}: {field} is {value!r}; it must be an integer from 1 to {most}.")
    return value


def _text(value: Any, field: str, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {field} is {value!r}; it must be a string or null.")
    return value


def _name(value: Any, field: str, where: str) -> str | None:
    if value == "":
        raise ConfigError(f"{where}: {field} is empty; give a name or null.")
    return _text(value, field, where)


def _ends_by(value: Any, where: str) -> EndsBy:
    choices = [way.value for way in EndsBy]
    if value not in choices:
        raise ConfigError(f"{where}: ends_by is {value!r}; choose one of {', '.join(choices)}.")
    return EndsBy(value)


def _retention(value: Any, where: str) -> Retention | None:
    """As of a request without a key."""
    if value is None:
        return None
    is_list = isinstance(value, list) and all(isinstance(each, dict) for each in value)
    if not is_list or any("until_token" not in each for each in value):
        raise ConfigError(
            f"{where}: retention must be a list of objects with until_token, and perhaps priority "
            "and for_s."
        )
    for each in value:
        for name, number in each.items():
            kinds = int | float if name == "for_s" else int
            is_number = isinstance(number, kinds) and not isinstance(number, bool)
            if name not in RANGE or not is_number:
                raise ConfigError(
                    f"{where}: {name!r} of retention is {number!r}; a range has the numbers "
                    f"{', '.join(RANGE)}."
                )
    try:
        ranges = checked_ranges([KeepRange(**each) for each in value])
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Retention(tuple(ranges), None, SHARE)
