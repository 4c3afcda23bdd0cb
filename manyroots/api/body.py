"""A request's body: read within its limit, parsed strictly, turned into a typed request.

Takes a Starlette request and a msgspec type; gives an instance of it, or a RequestError that
names the field. Stricter than JSON parsers usually are, and always in the same way: NaN and
Infinity, lone surrogates and duplicate keys are refused (with duplicates, two readers of one
body could disagree on what was asked). Unknown fields are dropped and logged once, since clients
send those of every server that they know; --strict-requests refuses them unless they are null.
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

from manyroots.api.notices import Notices
from manyroots.api.requests import ELSEWHERE, Ignored, ResponseFormat
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


async def read_request(
    request: Request, kind: type[T], *, max_bytes: int, notices: Notices | None = None
) -> T:
    """The body as a `kind`. Without `notices` unknown fields are refused."""
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
    return parse_request(body, kind, notices)


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


def parse_request(body: bytes, kind: type[T], notices: Notices | None = None) -> T:
    """Parse strictly, then convert to `kind`. Without `notices` unknown fields are refused."""
    try:
        value = _parse(body)
        if _SURROGATE.search(body) or _CONSTANT.search(body):
            _refuse_unusable(value, "")
        return msgspec.convert(_fitted(value, kind, notices), kind)
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


def _fitted(value: Any, kind: Any, notices: Notices | None, where: str = "") -> Any:
    """A body without the fields that mean nothing here. Whole numbers are integers, also where they
    are written as 4.0. The same for the objects inside that have a shape."""
    if not isinstance(value, dict):
        return value
    known, drops_unknown = _shapes(kind), notices is not None and not notices.refuses_unknown
    fitted: dict[str, Any] = {}
    for name, item in value.items():
        if name in known:
            shape = known[name]
            if shape is int:
                item = _whole(item)
            elif shape is Ignored and item is not None and notices is not None:
                notices.tell(where + name, "is accepted without effect")
            elif isinstance(shape, type):
                item = _fitted(item, shape, notices, f"{where}{name}.")
        elif item is None:
            continue
        elif drops_unknown:
            assert notices is not None
            hint = f" ({ELSEWHERE[where + name]})" if where + name in ELSEWHERE else ""
            notices.tell(where + name, f"is a field that this server does not know{hint}")
            continue
        fitted[name] = item
    return fitted


def _whole(item: Any) -> Any:
    if isinstance(item, list):
        return [_whole(entry) for entry in item]
    return int(item) if isinstance(item, float) and item.is_integer() else item


@functools.cache
def _shapes(kind: Any) -> dict[str, Any]:
    """A struct's fields, each with the struct that it may hold, `int` for integers, `Ignored` for
    those without effect, or None."""
    shapes: dict[str, Any] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        if hints[field.name] == Ignored:
            shapes[field.encode_name] = Ignored
            continue
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
