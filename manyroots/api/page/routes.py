"""Routes of the page: its files, its stream of events, and what can be done from it.

The files are the same for everyone and hold no data. Data needs the admin key; without one it is
for this machine alone (`access.py`), and nothing can be changed. Keys travel in a header, never in
a cookie, so that no other site's page can make a browser send one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manyroots.api.about import root
from manyroots.api.body import read_request
from manyroots.api.endpoints import EVENTS, JSON, Endpoint
from manyroots.api.events import EventStream, answer, encode, json_response
from manyroots.api.page.access import check_local
from manyroots.api.page.hub import PageHub
from manyroots.api.page.what_if import Simulated, SimulateRequest
from manyroots.api.state import ServerState, server_of
from manyroots.errors import NotFoundError, RequestError, UnavailableError
from manyroots.ids import RequestId
from manyroots.server_config import ServerSettings

PageHandler = Callable[[Request], Awaitable[Response]]

INDEX = "index.html"
LINES = "application/jsonl"
LOADED = ("text/css", "text/javascript", "image/svg+xml")
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types page"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
NO_STORE = {"cache-control": "no-store", **SECURITY}


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /page/abort"""

    request_id: int


class Aborted(msgspec.Struct, kw_only=True):
    request_id: int
    status: str = "aborting"


@cache
def page_files() -> Mapping[str, bytes]:
    """The page and what it loads, by path."""
    folder = files("manyroots.api.page") / "static"
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    return {"/" if name == INDEX else f"/page/{name}": data for name, data in found.items()}


def page_endpoints(settings: ServerSettings) -> list[Endpoint]:
    """Its data and actions."""
    if not settings.page:
        return []
    has_key = settings.admin_key is not None

    def data(path: str, handler: PageHandler, text: str, **more: object) -> Endpoint:
        shown = handler if has_key else _for_this_machine(handler)
        return Endpoint(path, shown, text, is_admin=has_key, **more)  # type: ignore[arg-type]

    known = [
        data("/page/stream", stream, "The page's live data.", media=(EVENTS,)),
        data("/page/step", explain_step, "One step, row by row: ?id=."),
        data("/page/trace", trace, "The last traffic without texts.", media=(LINES,)),
        data(
            "/page/simulate", simulate, "Replay it under other settings.", body=SimulateRequest,
            answer=Simulated, methods=("POST",),
        ),
    ]  # fmt: skip
    if has_key:
        known.append(
            Endpoint(
                "/page/abort", abort, "End a sequence.", AbortRequest, Aborted, ("POST",), (JSON,),
                is_admin=True,
            )
        )  # fmt: skip
    return [
        *known,
        Endpoint("/page/{file}", show_file, "What the page loads.", media=LOADED),
    ]


async def show_root(request: Request) -> Response:
    """The page for browsers, and for programs what they have always been told."""
    if "text/html" not in request.headers.get("accept", ""):
        return await root(request)
    return await show_file(request)


async def show_file(request: Request) -> Response:
    path = request.scope["path"]
    data = page_files().get(path)
    if data is None:
        raise HTTPException(404)
    kind = _TYPES["html" if path == "/" else path.rpartition(".")[2]]
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**SECURITY, "cache-control": "no-cache", "etag": tag, "vary": "accept"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


async def stream(request: Request) -> Response:
    hub = hub_of(server_of(request))
    wants_tree = request.query_params.get("tree") == "1"
    response = EventStream(hub.stream(wants_tree=wants_tree), hub.limit.admit(1))
    response.headers.update(NO_STORE)
    return response


async def explain_step(request: Request) -> Response:
    server = server_of(request)
    given = request.query_params.get("id", "")
    if not given.isdecimal() or len(given) > 15:
        raise RequestError(f"id is {given[:60]!r}; send a step's number.", field="id")
    if server.loaded is None:
        raise UnavailableError("The model is still loading; try again in a moment.")
    snapshot = await server.engine.look(since_step=2**62, explain_step=int(given))
    if snapshot.explained is None:
        raise NotFoundError(f"Step {given} is not among the last ones.", field="id")
    names = {str(number): name for number, name in snapshot.adapter_names.items()}
    body = {"step": snapshot.explained, "names": names}
    return Response(encode(body), media_type=JSON, headers=NO_STORE)


async def trace(request: Request) -> Response:
    traffic = server_of(request).traffic
    text = "" if traffic is None else "".join(traffic.lines())
    headers = {**NO_STORE, "content-disposition": 'attachment; filename="trace.jsonl"'}
    return Response(text, media_type=LINES, headers=headers)


async def simulate(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, SimulateRequest, max_bytes=65536)
    if server.loaded is None or server.traffic is None:
        raise UnavailableError("The model is still loading; try again in a moment.")
    hub = hub_of(server)
    snapshot = await server.engine.look()
    work = hub.what_if.run(body, server.loaded, server.traffic, snapshot.settings, snapshot.steps)
    return await answer(request, work)


async def abort(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, AbortRequest, max_bytes=1024)
    if server.loaded is None or not server.engine.abort(RequestId(body.request_id)):
        raise NotFoundError(f"Request {body.request_id} is not here (any more).", field=None)
    return json_response(Aborted(request_id=body.request_id))


def hub_of(server: ServerState) -> PageHub:
    """The one hub of a server, made when a page first asks."""
    if server.page is None:
        server.page = PageHub(server)
    assert isinstance(server.page, PageHub)
    return server.page


def _for_this_machine(handler: PageHandler) -> PageHandler:
    async def checked(request: Request) -> Response:
        check_local(request)
        return await handler(request)

    return checked
