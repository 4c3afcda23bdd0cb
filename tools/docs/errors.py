"""docs/reference/errors.md: every exception and the answer that it becomes over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.exceptions import HTTPException

from manyroots import errors
from manyroots.api.errors import GenerationError, anthropic_error, error_body
from tools.docs.markdown import NOTICE, code, table

HEAD = f"""\
# Errors: exceptions and HTTP answers

{NOTICE}
Every message names the value and the remedy. An HTTP answer has OpenAI's shape:
`{{"error": {{"message", "type", "param", "code"}}}}`. Routes below `/v1/messages` answer in
Anthropic's shape. [Bad inputs](../bad-inputs.md) lists refused inputs by case. A command exits with
code 2 and prints the message.

"""
STATUSES = {
    401: "the key is missing or wrong",
    403: "the key may not use this route",
    404: "there is no such route",
    405: "the route does not take this method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "the content type is not JSON",
}
"""Answers that no exception of manyroots stands for."""


def _below(kind: type[Exception], depth: int = 0) -> Iterator[tuple[int, type[Exception]]]:
    yield depth, kind
    for inner in kind.__subclasses__():
        if inner.__module__ == errors.__name__ or inner is GenerationError:
            yield from _below(inner, depth + 1)


def _made(kind: type[Exception]) -> Exception | None:
    """One of the kind, if it may become an answer."""
    if issubclass(kind, errors.RequestError):
        return kind("what", field=None)
    if issubclass(kind, errors.OverloadedError):
        return kind("what", retry_after_s=1)
    if kind in (errors.UnavailableError, GenerationError):
        return kind("what")
    return None


def page() -> str:
    rows = []
    for depth, kind in _below(errors.ManyrootsError):
        status = of_type = error_code = anthropic = ""
        if (error := _made(kind)) is not None:
            number, body = error_body(error)
            status, of_type = str(number), code(body.error.type)
            error_code = code(body.error.code or "")
            shape = anthropic_error(error)[1]["error"]
            assert isinstance(shape, dict)
            anthropic = code(shape["type"])
        name = "&nbsp;&nbsp;" * depth + code(kind.__name__)
        rows.append((name, status, of_type, error_code, anthropic, kind.__doc__ or ""))
    heads = ("exception", "status", "`type`", "`code`", "`type` of Anthropic", "meaning")
    parts = [HEAD, table(heads, rows)]
    parts.append("\n`ConfigError` and `ModelError` are raised at start, before any request.\n")
    parts.append("\n## Answers of the server itself\n\n")
    rows = []
    for number, text in STATUSES.items():
        _, body = error_body(HTTPException(number, "what"))
        rows.append((str(number), code(body.error.type), code(body.error.code or ""), text))
    parts.append(table(("status", "`type`", "`code`", "meaning"), rows))
    return "".join(parts)
