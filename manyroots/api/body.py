"""A request's body: read within its limit, parsed strictly, turned into a typed request.

Takes a Starlette request and a msgspec type; gives an instance of it, or a RequestError that
names the field. Stricter than JSON parsers usually are, and always in the same way: NaN and
Infinity, lone surrogates and duplicate keys are refused (with duplicates, two readers of one
body could disagree on what was asked). Unknown fields are dropped and logged once, since clients
send those of every server that they know; --strict-requests refuses them unless they are null.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from manyroots.api.aside import aside
from manyroots.api.json_body import LargeBodies, is_small, parse_json
from manyroots.api.notices import Notices
from manyroots.api.requests import ELSEWHERE, Ignored, ResponseFormat
from manyroots.errors import RequestError, TooLargeError

T = TypeVar("T")

_FORM = "application/x-www-form-urlencoded"
_CONTENT_TYPES = ("application/json", "", _FORM)
"""What says JSON, what says nothing, and what `curl -d` says whatever it sends."""
_PATH = re.compile(r" - at `\$\.?(.*)`$")
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
    request.state.is_large = not is_small(body)
    if not request.state.is_large:
        return parse_request(body, kind, notices)
    return await aside(lambda: _typed(_large().parse(body), kind, notices))


async def beside_reading(request: Request, job: Callable[[], T]) -> T:
    """Run what takes longer for larger bodies where `read_request` has read this request's: at
    once, or off the event loop."""
    return await aside(job) if request.state.is_large else job()


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
    return _typed(parse_json(body), kind, notices)


def _typed(value: Any, kind: type[T], notices: Notices | None) -> T:
    try:
        return msgspec.convert(_fitted(value, kind, notices), kind)
    except RecursionError as error:
        raise RequestError(
            "The body is nested too deeply; no request needs more than a few levels.", field=None
        ) from error
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


@functools.cache
def _large() -> LargeBodies:
    return LargeBodies()


def as_format(wanted: dict[str, Any], field: str) -> ResponseFormat:
    """A `response_format` that came in another API's words, as `field`."""
    try:
        return msgspec.convert(wanted, ResponseFormat)
    except msgspec.ValidationError as error:
        raise RequestError(f"{field} is not usable: {error}.", field=field) from error


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
        # Nearly always, and there may be a million.
        return item if set(map(type, item)) == {int} else [_whole(entry) for entry in item]
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
