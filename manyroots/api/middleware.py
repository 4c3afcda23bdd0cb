"""What every request passes on its way in: a request id, header limits, the keys, a sane host; and
its answer on the way out while the server drains.

Plain ASGI, outermost first in the order of the classes. Decides by the routed path alone
(`scope["path"]`), never by the Host header or a reconstructed address.
"""

from __future__ import annotations

import base64
import hmac
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manyroots.api.errors import error_response
from manyroots.api.tenants import Tenants, set_tenant
from manyroots.gateway.session import MAX_SESSION_CHARS, SESSION_HEADER, current_session

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
OPEN_PATHS = frozenset(
    {"/", "/live", "/health", "/ready", "/ping", "/metrics", "/openapi.json", "/docs"}
)
"""What an orchestrator asks, which has no key; and what a page of a browser loads first."""

_HOST = re.compile(r"([^\s/?#@\\\[\]:]*|\[[0-9A-Za-z:.%]+\])(:[0-9]*)?")
"""A name or an address; one of IPv6 has brackets."""
_WITH_HOST = re.compile(r"\Ahttps?://[^/]*/?", re.IGNORECASE)
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def id_or_new(given: Sequence[str]) -> str:
    """The id that a caller gave, or a new one where it gave none that is sane."""
    is_sane = len(given) == 1 and _SANE_ID.fullmatch(given[0])
    return given[0] if is_sane else uuid.uuid4().hex


class RequestIds:
    """Answers carry an id: the caller's own if it is a sane one, else a new one. The caller's own
    is part of the body's `id`, too.

    It is only for the caller's logs. Nothing inside is looked up by it, so two requests with the
    same id have nothing to do with each other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = id_or_new(headers.getlist("x-request-id"))
        if session := headers.get(SESSION_HEADER):
            current_session.set(session[:MAX_SESSION_CHARS])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class CloseOnDrain:
    """While the server drains, every answer is its connection's last: callers keep connections open
    for their next request, which another server is to have."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)


class HeaderLimits:
    """Refuses requests with too many headers, or too much in them, or two lengths: where a proxy
    goes by one of these and a server by the other, a request may hide in another one's body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            size = sum(len(name) + len(value) for name, value in headers)
            if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
                error = HTTPException(
                    431,
                    f"The request has {len(headers)} headers of {size} bytes; at most "
                    f"{MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes are allowed.",
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
                error = HTTPException(
                    400,
                    "The request has Content-Length and Transfer-Encoding; send one of them.",
                    {"connection": "close"},
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RootPath:
    """Takes off what proxies write in front of a path: the prefix under which one shows this
    server, where it has left it on, and scheme and host, which HTTP allows there.

    Before anything is decided by the path: the keys and the routes see the same one.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._prefix = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = _WITH_HOST.sub("/", scope["path"])
            if self._prefix and path.startswith(f"{self._prefix}/"):
                path = path.removeprefix(self._prefix)
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class Keys:
    """Lets callers in that bring the key: the admin's to the paths that are his, else the API's.

    Without an API key everyone may use the other paths; the admin's are never open.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        admin_key: str | None,
        admin_paths: frozenset[str],
        open_paths: frozenset[str] = OPEN_PATHS,
        tenants: Tenants | None = None,
    ) -> None:
        """`tenants`: keys with rights of their own, one of which is then needed."""
        assert admin_key is not None or not admin_paths
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._admin_key = b"" if admin_key is None else admin_key.encode()
        self._admin_paths = admin_paths
        self._open_paths = open_paths
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if self._tenants is not None and scope["type"] == "http":
            set_tenant(self._tenants.find(_bearer_token(scope)))
        if error is not None:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> HTTPException | None:
        given = _bearer_token(scope)
        if scope["path"] in self._admin_paths:
            if _is_same(given, self._admin_key):
                return None
            is_tenant = self._tenants is not None and self._tenants.find(given) is not None
            if is_tenant or (self._api_key is not None and _is_same(given, self._api_key)):
                return HTTPException(
                    403, "This needs the admin key; the API key is for generating alone."
                )
            return _unauthorized("admin key")
        if scope["path"] in self._open_paths:
            return None
        if self._tenants is not None and self._tenants.find(given) is not None:
            return None
        if self._api_key is None and self._tenants is None:
            return None
        if self._api_key is not None and _is_same(given, self._api_key):
            return None
        return _unauthorized("API key")


class Hosts:
    """Refuses a Host header that is more than a host and a port. Nothing here is decided by it, but
    whatever stands in front of this server, or reads its logs, may take it for an address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) > 1 or any(_HOST.fullmatch(host) is None for host in hosts):
                shown = ", ".join(hosts)[:100]
                error = HTTPException(
                    400, f"The Host header is {shown!r}; send one, of a host and perhaps a port."
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def brings(scope: Scope, key: str) -> bool:
    """Whether a request has this key."""
    return _is_same(_bearer_token(scope), key.encode())


def _bearer_token(scope: Scope) -> bytes | None:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if not given and len(plain) == 1:  # as Anthropic's clients send it
        return bytes(plain[0].strip())
    if len(given) != 1:
        return None
    scheme, _, token = given[0].partition(b" ")
    if scheme.lower() == b"basic":
        return _password(token)
    return bytes(token.strip()) if scheme.lower() == b"bearer" else None


def _password(token: bytes) -> bytes | None:
    """The key as a password of any user: clients that know no keys take that from a netrc file."""
    try:
        _, _, password = base64.b64decode(token.strip(), validate=True).partition(b":")
    except ValueError:
        return None
    return password or None


def _is_same(given: bytes | None, key: bytes) -> bool:
    # Constant time, over bytes: nothing is learnt from how long a wrong key takes.
    return given is not None and hmac.compare_digest(given, key)


def _unauthorized(key: str) -> HTTPException:
    return HTTPException(
        401,
        f"The {key} is missing or wrong; send it as 'Authorization: Bearer KEY'.",
        {"www-authenticate": "Bearer"},
    )
