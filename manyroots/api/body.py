"""A request's body: read within its limit, parsed strictly, turned into a typed request.

Takes a Starlette request and a msgspec type; gives an instance of it, or a RequestError that
names the field. Stricter than JSON parsers usually are, and always in the same way: NaN and
Infinity, lone surrogates and duplicate keys are refused (with duplicates, two readers of one
body could disagree on what was asked), and so are unknown fields, as OpenAI's server does, unless
they are null and so ask for nothing.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import typing
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from manyroots.api.requests import ELSEWHERE, ResponseFormat
from manyroots.errors import RequestError, TooLargeError

T = TypeVar("T")

_FORM = "application/x-www-form-urlencoded"
_CONTENT_TYPES = ("application/json", "", _FORM)
"""What says JSON, what says nothing, and what `curl -d` says whatever it sends."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_CONSTANT = re.compile(rb"NaN|Infinity")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`$")
_REMEDIES = {
    "model": "send one of the names that GET /v1/models lists",
    "messages": "send the chat so far as a list, for example [{'role': 'user', 'content': 'Hi'}]",
}
"""What to do about fields that must be there, other than to send them."""
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$")


async def read_request(request: Request, kind: type[T], *, max_bytes: int) -> T:
    """The body as a `kind`."""
    given = request.headers.get("content-type", "")
    content_type = given.partition(";")[0].strip().lower()
    wrong = HTTPException(415, f"The content-type is {given[:100]!r}; send application/json.")
    if content_type not in _CONTENT_TYPES and not content_type.endswith("+json"):
        raise wrong
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise HTTPException(
            415, f"The content-encoding is {encoding[:100]!r}; send the body as plain JSON."
        )
    body = await _read(request, max_bytes)
    if content_type == _FORM and not body.lstrip().startswith(b"{"):
        raise wrong
    return parse_request(body, kind)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise RequestError("The body ended before its content-length.", field=None) from error
    return b"".join(chunks)


def _too_large(max_bytes: int) -> TooLargeError:
    # The connection stays open and uvicorn discards the rest: most clients read no answer before
    # they have sent everything, and a reset would take it from them.
    return TooLargeError(
        f"The body is larger than {max_bytes} bytes; send less, or in several requests.",
        field=None,
    )


def parse_request(body: bytes, kind: type[T]) -> T:
    """Parse strictly, then convert to `kind`."""
    try:
        value = _parse(body)
        if _SURROGATE.search(body) or _CONSTANT.search(body):
            _refuse_unusable(value, "")
        return msgspec.convert(_fitted(value, kind), kind)
    except RecursionError as error:
        raise RequestError(
            "The body is nested too deeply; no request needs more than a few levels.", field=None
        ) from error
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


def as_format(wanted: dict[str, Any], field: str) -> ResponseFormat:
    """A `response_format` that came in another API's words, as `field`."""
    try:
        return msgspec.convert(wanted, ResponseFormat)
    except msgspec.ValidationError as error:
        raise RequestError(f"{field} is not usable: {error}.", field=field) from error


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


def _fitted(value: Any, kind: Any) -> Any:
    """A body without fields that are null and mean nothing here: clients send those of every server
    that they know. Whole numbers are integers, however they are written: some languages write 4 as
    4.0. The same for the objects inside that have a shape of their own."""
    if not isinstance(value, dict):
        return value
    known = _shapes(kind)
    return {
        name: _whole(item) if known.get(name) is int else _fitted_inside(item, known.get(name))
        for name, item in value.items()
        if item is not None or name in known
    }


def _fitted_inside(item: Any, kind: Any) -> Any:
    return item if kind is None else _fitted(item, kind)


def _whole(item: Any) -> Any:
    if isinstance(item, list):
        return [_whole(entry) for entry in item]
    return int(item) if isinstance(item, float) and item.is_integer() else item


@functools.cache
def _shapes(kind: Any) -> dict[str, Any]:
    """A struct's fields, each with the struct that it may hold, `int` for integers, or None."""
    shapes: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        kinds = [field.type, *typing.get_args(field.type)]
        structs = [item for item in kinds if isinstance(item, type)]
        structs = [item for item in structs if issubclass(item, msgspec.Struct)]
        integers = {int, list[int]}.intersection(item for item in kinds if item is not Any)
        shapes[field.encode_name] = structs[0] if structs else int if integers else None
    return shapes


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


def _explain(message: str) -> RequestError:
    """msgspec's message, in the words of this API."""
    path = _PATH.search(message)
    where = path[1] if path else ""
    reason = message[: path.start()] if path else message
    unknown, missing = _UNKNOWN_FIELD.match(reason), _MISSING_FIELD.match(reason)
    if unknown or missing:
        match = unknown or missing
        assert match is not None
        name = f"{where}.{match[1][:60]}".lstrip(".")
        if missing:
            remedy = _REMEDIES.get(name, "send it too")
            return RequestError(f"{name} is missing; {remedy}.", field=name)
        hint = f"; {ELSEWHERE[name]}." if name in ELSEWHERE else ""
        return RequestError(f"Unrecognized request argument supplied: {name}{hint}", field=name)
    if not where:
        return RequestError(f"The body is not a JSON object: {reason}.", field=None)
    return RequestError(f"{where} has the wrong type: {reason}.", field=where)
