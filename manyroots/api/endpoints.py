"""One route and what it takes and gives: what the routes and their document are both made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
HTML = "text/html"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route. Its body is checked by the same type that the document shows."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: Any = None
    """The msgspec type of the request's body; None if it has none."""
    answer: Any = dict[str, Any]
    """The msgspec type of a good answer."""
    methods: tuple[str, ...] = ("GET",)
    media: tuple[str, ...] = (JSON,)
    """What good answers may be."""
    is_admin: bool = False
    """For the admin key alone."""
    needs_json: bool = True
    """False: a body may be left out."""

    def route(self) -> Route:
        return Route(self.path, self.handler, methods=list(self.methods))


def post(
    path: str,
    handler: Callable[[Request], Awaitable[Response]],
    summary: str,
    body: Any,
    answer: Any = dict[str, Any],
    *,
    streams: bool = False,
    is_admin: bool = False,
) -> Endpoint:
    """A route that takes a body."""
    media = (JSON, EVENTS) if streams else (JSON,)
    return Endpoint(path, handler, summary, body, answer, ("POST",), media, is_admin)
