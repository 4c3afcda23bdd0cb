"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`.

Takes exceptions; gives responses. Every error of the server goes through here, also those of
unknown routes and wrong methods, so that a client never has to parse anything else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from manyroots.errors import (
    ManyrootsError,
    NotFoundError,
    OverloadedError,
    RequestError,
    TooLongError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

RETRY_WHEN_UNAVAILABLE_S = 5


class GenerationError(ManyrootsError):
    """The engine could not finish a sequence, through no fault of its caller."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        # Both may quote what a caller sent: keep them short, and encodable.
        self.message = _quotable(self.message, 2000)
        self.param = None if self.param is None else _quotable(self.param, 200)


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def _quotable(text: str, limit: int) -> str:
    return text[:limit].encode("utf-8", "replace").decode()


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body for an exception."""
    match error:
        case RequestError():
            codes = {NotFoundError: "model_not_found", TooLongError: "context_length_exceeded"}
            code = codes.get(type(error))
            detail = ErrorDetail(str(error), "invalid_request_error", error.field, code)
            return error.status, ErrorBody(detail)
        case OverloadedError():
            return 429, ErrorBody(ErrorDetail(str(error), "rate_limit_error", None, "queue_full"))
        case UnavailableError():
            return 503, ErrorBody(ErrorDetail(str(error), "server_error", None, "unavailable"))
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            code = "invalid_api_key" if error.status_code == HTTPStatus.UNAUTHORIZED else None
            return error.status_code, ErrorBody(ErrorDetail(error.detail, kind, None, code))
        case GenerationError():
            return 500, ErrorBody(ErrorDetail(str(error), "server_error"))
        case _:
            message = "The server failed on this request; its log says why."
            return 500, ErrorBody(ErrorDetail(message, "server_error"))


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Faults of a request that became another one name the field as its caller knows it."""
    try:
        yield
    except RequestError as error:
        if error.field is None or error.field not in names:
            raise
        name = names[error.field]
        text = re.sub(rf"\b{re.escape(error.field)}\b", name, str(error))
        raise type(error)(text, field=name) from error


ANTHROPIC_PATHS = ("/v1/messages",)
"""Below these, errors have Anthropic's shape."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: Exception) -> tuple[int, dict[str, object]]:
    """Status and body for an exception, as Anthropic's clients read them."""
    status, body = error_body(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = body.error.message
    if isinstance(error, TooLongError):
        # Clients have no code to tell this by: they look for these words, and shorten the chat.
        message = f"prompt is too long: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: Exception, path: str) -> Response:
    """`path`: the route's, which decides the shape."""
    body: object
    status, body = error_body(error)
    if path.startswith(ANTHROPIC_PATHS):
        status, body = anthropic_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(RETRY_WHEN_UNAVAILABLE_S)
    elif isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"])


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    match error.status_code:
        case 404:
            path = request.scope["path"]
            error.detail = f"There is no {request.method} {path[:200]} here{_hint(request)}"
        case 405:
            # Starlette lists a set, in another order at each start.
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            path = request.scope["path"]
            error.detail = (
                f"{path[:200]} does not take {request.method}; send {allowed or 'another'}."
            )
            if (instead := _instead(path)) is not None and request.method == "POST":
                error.detail = f"{path[:200]} does not take POST; {instead}."
    return error_response(error, request.scope["path"])


def _hint(request: Request) -> str:
    """What to do about a path that is not there."""
    app, path = request.app, request.scope["path"]
    if (flags := app.state.switched_off.get(path)) is not None:
        return f"; start the server with {flags}."
    meant = _meant(path, [getattr(route, "path", "") for route in app.routes])
    is_elsewhere = path in _INSTEAD and not path.endswith("/")  # a whole route of other servers
    if meant and not is_elsewhere:
        return f"; did you mean {meant}?"
    instead = _instead(path)
    return f"; {instead}." if instead else "; /docs lists what there is."


def _instead(path: str) -> str | None:
    """What to send where another server has this route."""
    if path == "/":
        return _PROMPTS
    if path.endswith(
        ("generateContent", "streamGenerateContent")
    ):  # Gemini's, after a model's name
        return _CHATS
    return next((said for start, said in _INSTEAD.items() if path.startswith(start)), None)


_NOT_STORED = "nothing is stored here: send whole conversations, and keep answers yourself"
_CHATS = "send messages to /v1/chat/completions"
_PROMPTS = "send prompts to /v1/completions"
_TEXT_ALONE = "this server's models read and write text alone"
_INSTEAD = {
    "/v1/responses/": _NOT_STORED,
    "/v1/chat/completions/": _NOT_STORED,
    "/v1/conversations": _NOT_STORED,
    "/v1/assistants": _NOT_STORED,
    "/v1/threads": _NOT_STORED,
    "/v1/files": _NOT_STORED,
    "/v1/batches": "send the requests themselves; they are batched as they come",
    "/v1/messages/batches": "send the requests themselves; they are batched as they come",
    "/v1/audio": _TEXT_ALONE,
    "/v1/images": _TEXT_ALONE,
    "/v1/realtime": "stream from /v1/chat/completions or /v1/responses",
    "/v1/engines/": "name the model in the body of /v1/completions",
    "/openai/deployments/": "name the model in the body of /v1/chat/completions",
    "/inference/v1/generate": "send token ids as the prompt of /v1/completions",
    "/v1beta/": _CHATS,
    "/v1/complete": _PROMPTS,
    "/v1/moderations": "this server does not classify texts",
    "/v1/rerank": "compare texts with /v1/score",
    "/rerank": "compare texts with /v1/score",
    "/generate_stream": _PROMPTS,
    "/info": "GET /v1/models has the model's name and context",
    "/api/generate": _PROMPTS,
    "/api/chat": _CHATS,
    "/api/show": "GET /v1/models has the model's name and context",
    "/api/embed": "send texts to /v1/embeddings",
    "/api/tags": "GET /v1/models lists the models",
    "/invocations": "send chats to /v1/chat/completions",
}
"""What stands here for routes that other servers have, by how they begin."""


def _meant(path: str, known: Sequence[str]) -> str | None:
    """The route that a wrong path is nearest to: a part of its path is missing in front (a base
    address without /v1), or too much (/v1 twice, a slash at the end)."""
    wrong = f"/{path.strip('/')}"
    near = [
        right
        for right in known
        if wrong != "/" and right != "/" and (right.endswith(wrong) or wrong.endswith(right))
    ]
    return min(near, key=lambda right: (abs(len(right) - len(wrong)), right), default=None)


EXCEPTION_HANDLERS: dict[type[Exception] | int, ExceptionHandler] = {
    ManyrootsError: _answer,
    HTTPException: _answer_http,
    Exception: _answer,
}
