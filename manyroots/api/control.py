"""Routes to train or operate the model: pause, sleep, other weights, an empty cache.

Only there with --admin-key, and only for it. Named as vLLM names them, and as SGLang does.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manyroots.api.body import read_request
from manyroots.api.endpoints import Endpoint, post
from manyroots.api.events import json_response
from manyroots.api.requests import Ignored
from manyroots.api.responses import Replicas
from manyroots.api.state import server_of
from manyroots.engine.client import EngineClient, PauseMode
from manyroots.errors import RequestError, UnavailableError
from manyroots.gateway.replica_set import ReplicaSet
from manyroots.gateway.router_client import RouterClient


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights"""

    model_path: str
    load_format: Ignored = None
    flush_cache: Ignored = None
    abort_all_requests: bool | None = None


class ControlDone(msgspec.Struct, kw_only=True):
    success: bool = True
    message: str
    freed_pages: int = 0


async def pause(request: Request) -> Response:
    engine, mode = _engine(request), _mode(request, PauseMode.ABORT)
    server_of(request).num_pauses += 1
    await engine.pause(mode)
    return json_response(ControlDone(message="paused"))


async def resume(request: Request) -> Response:
    await _engine(request).resume()
    return json_response(ControlDone(message="running"))


async def sleep(request: Request) -> Response:
    await _engine(request).sleep(_mode(request, PauseMode.ABORT))
    return json_response(ControlDone(message="asleep"))


async def wake(request: Request) -> Response:
    await _engine(request).wake()
    return json_response(ControlDone(message="awake"))


async def reset_cache(request: Request) -> Response:
    reply = await _engine(request).reset_cache()
    return json_response(ControlDone(message="the cache is empty", freed_pages=reply.num_pages))


async def update_weights(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(
        request, UpdateWeightsRequest, max_bytes=server.settings.max_body_bytes
    )
    engine = _engine(request)
    mode = PauseMode.ABORT if body.abort_all_requests else PauseMode.WAIT
    async with server.updating:
        was_paused, num_pauses = engine.is_paused, server.num_pauses
        if not was_paused:
            await engine.pause(mode)
        try:
            reply = await engine.update_weights(body.model_path)
        finally:
            if not was_paused and server.num_pauses == num_pauses:
                await engine.resume()
    return json_response(ControlDone(message="updated", freed_pages=reply.num_pages))


async def is_paused(request: Request) -> Response:
    return JSONResponse({"is_paused": _engine(request).is_paused})


async def is_sleeping(request: Request) -> Response:
    return JSONResponse({"is_sleeping": _engine(request).is_asleep})


def _engine(request: Request) -> EngineClient:
    server = server_of(request)
    if server.loaded is None:
        raise UnavailableError("The model is still loading; try again in a moment.")
    return server.engine


def _mode(request: Request, default: PauseMode) -> PauseMode:
    given = request.query_params.get("mode", default.value)
    if given not in (mode.value for mode in PauseMode):
        raise RequestError(f"mode is {given[:60]!r}; choose keep, wait or abort.", field="mode")
    return PauseMode(given)


_POSTED = (
    (("/pause", "/pause_generation"), pause, "Begin no step; ?mode=keep, wait or abort."),
    (("/resume", "/continue_generation"), resume, "Go on."),
    (("/sleep", "/release_memory_occupation"), sleep, "Give all memory back."),
    (("/wake_up", "/resume_memory_occupation"), wake, "Load again, and go on."),
    (("/reset_prefix_cache", "/flush_cache"), reset_cache, "Forget what could be reused."),
)


async def list_replicas(request: Request) -> Response:
    """The engines of this server; none are listed where there is one."""
    engine = server_of(request).engine
    views = engine.replicas if isinstance(engine, ReplicaSet | RouterClient) else []
    return json_response(Replicas(views))


async def restart_replicas(request: Request) -> Response:
    """Renew all engines, one after the other. It goes on if its caller leaves."""
    server_of(request).accepting  # noqa: B018  raises while there is no model
    engine = server_of(request).engine
    if not isinstance(engine, ReplicaSet | RouterClient):
        raise RequestError(
            "This server has one engine; restart the server, or start it with --replicas 2.",
            field=None,
        )
    count = await asyncio.shield(asyncio.ensure_future(engine.restart()))
    return json_response(ControlDone(message=f"{count} replicas restarted"))


CONTROL_ENDPOINTS = [
    *(
        Endpoint(path, handler, text, answer=ControlDone, methods=("POST",), is_admin=True)
        for paths, handler, text in _POSTED
        for path in paths
    ),
    *(
        post(path, update_weights, "Take other weights.", UpdateWeightsRequest, ControlDone,
             is_admin=True)
        for path in ("/update_weights", "/update_weights_from_disk")
    ),
    Endpoint("/is_paused", is_paused, "Whether it is paused.", is_admin=True),
    Endpoint("/is_sleeping", is_sleeping, "Whether it sleeps.", is_admin=True),
    Endpoint(
        "/v1/replicas/restart", restart_replicas, "Renew all engines, one after the other.",
        answer=ControlDone, methods=("POST",), is_admin=True,
    ),
    Endpoint(
        "/v1/replicas", list_replicas, "The engines of this server.", answer=Replicas, is_admin=True
    ),
]  # fmt: skip
