"""Strict JSON: a body's bytes as plain values.

Takes bytes; gives dicts, lists, texts and numbers, or a RequestError. NaN and Infinity, lone
surrogates and duplicate keys are refused: with duplicates, two readers of one body could disagree
on what was asked. The number of values is bounded.

Python's parser holds the interpreter while it runs, a second for 8 MB of small values. So large
bodies are parsed by a helper process, `python -m manyroots.api.json_body`, and only what they hold
comes back, in a form that is read 10 times as fast.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import msgspec

from manyroots.errors import RequestError, TooLargeError
from manyroots.process.helper_process import HelperDiedError, HelperProcess, Message, answer_calls

SMALL_BYTES = 1 << 16
SMALL_TEXT_BYTES = 1 << 20
"""Of a body that is mostly text: parsed at once all the same."""
_SMALL_VALUES = 1 << 14
MAX_VALUES = 1 << 20
MAX_CONTAINERS = 1 << 17
_CPU_S = 10
_MEMORY_BYTES = 2 << 30
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def is_small(body: bytes) -> bool:
    """Whether a body is parsed in a few milliseconds, whatever it holds."""
    if len(body) <= SMALL_BYTES:
        return True
    return len(body) <= SMALL_TEXT_BYTES and sum(_counts(body)) <= _SMALL_VALUES


def parse_json(body: bytes) -> Any:
    """Parse strictly."""
    try:
        if len(body) > SMALL_BYTES:
            _check_counts(body)
        value = _parse(body)
        if _SURROGATE.search(body) or b"NaN" in body or b"Infinity" in body:
            _refuse_unusable(value, "")
        return value
    except RecursionError as error:
        raise RequestError(
            "The body is nested too deeply; no request needs more than a few levels.", field=None
        ) from error


class LargeBodies:
    """Parses bodies in a helper process, one at a time. Any thread may ask."""

    def __init__(self) -> None:
        self._helper = HelperProcess("manyroots.api.json_body")

    def parse(self, body: bytes) -> Any:
        try:
            kind, *told = self._helper.call([body])
        except HelperDiedError as died:
            raise RequestError(
                f"The body of {len(body)} bytes can't be parsed: {died}. Send less, or in several "
                "requests.",
                field=None,
            ) from died
        if kind == b"value":
            return msgspec.msgpack.decode(told[0])
        message, field = told[0].decode(), told[1].decode() or None
        raise (TooLargeError if kind == b"large" else RequestError)(message, field=field)


def _counts(body: bytes) -> tuple[int, int]:
    """At most so many values beside others, and so many lists and objects."""
    return body.count(b","), body.count(b"[") + body.count(b"{")


def _check_counts(body: bytes) -> None:
    if _are_within(_counts(body)):
        return
    values, containers = _counts(_STRING.sub(b"", body))  # what texts hold does not count
    if not _are_within((values, containers)):
        raise TooLargeError(
            f"The body holds {values + containers} values, {containers} of them lists and objects; "
            f"at most {MAX_VALUES} values and {MAX_CONTAINERS} lists and objects are allowed. Send "
            "less, or in several requests.",
            field=None,
        )


def _are_within(counts: tuple[int, int]) -> bool:
    return sum(counts) <= MAX_VALUES and counts[1] <= MAX_CONTAINERS


def _parse(body: bytes) -> Any:
    try:
        return json.loads(
            body.removeprefix(codecs.BOM_UTF8).decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_NotANumber,
        )
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The body is not UTF-8: {error.reason} at byte {error.start}.", field=None
        ) from error
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body is not JSON: {error.msg} at character {error.pos}.", field=None
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(f"The body holds too long a number: {error}.", field=None) from error


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise RequestError(
                f"{name[:60]!r} is given twice in the same object; give it once.", field=name[:60]
            )
        seen.add(name)
    raise AssertionError("an object with fewer names than pairs has a duplicate")


class _NotANumber:
    """Stands for NaN or Infinity until the whole is parsed and its place is known."""

    def __init__(self, name: str) -> None:
        self.name = name


def _refuse_unusable(value: Any, where: str) -> None:
    """Python's parser takes NaN, and half a character spelled as an escape; nothing here can."""
    match value:
        case _NotANumber():
            raise RequestError(
                f"{where or 'The body'} is {value.name}; JSON has no such number, "
                "send a finite one.",
                field=where or None,
            )
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{where or 'The body'} holds the lone surrogate "
                    f"\\u{ord(value[error.start]):04x}, which is not a character; remove it.",
                    field=where or None,
                ) from error
        case dict():
            for name, item in value.items():
                _refuse_unusable(name, where)
                _refuse_unusable(item, f"{where}.{name[:60]}".lstrip("."))
        case list():
            for place, item in enumerate(value):
                _refuse_unusable(item, f"{where}[{place}]")


def _answer(message: Message) -> Message:
    try:
        return [b"value", msgspec.msgpack.encode(parse_json(message[0]))]
    except TooLargeError as error:
        return [b"large", str(error).encode(), b""]
    except RequestError as error:
        field = (error.field or "").encode("utf-8", "replace")
        return [b"refused", str(error).encode("utf-8", "replace"), field]
    except OverflowError:
        told = "The body holds an integer beyond 64 bits; send a smaller one."
        return [b"refused", told.encode(), b""]


if __name__ == "__main__":
    answer_calls(_answer, cpu_s=_CPU_S, memory_bytes=_MEMORY_BYTES)
