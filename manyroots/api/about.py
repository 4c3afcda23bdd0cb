"""Routes that say what this server is and how it does: models, health, metrics, version."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manyroots.api.errors import RETRY_WHEN_UNAVAILABLE_S
from manyroots.api.events import json_response
from manyroots.api.middleware import brings
from manyroots.api.responses import ModelCard, ModelList
from manyroots.api.state import Phase, ServerState, Service, server_of
from manyroots.api.tenants import current_tenant
from manyroots.engine.adapter_table import KnownAdapter
from manyroots.version import __version__

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def root(request: Request) -> Response:
    """Where agents knock before they send anything."""
    return JSONResponse({"name": "manyroots", "version": __version__, "docs": "/docs"})


async def health(request: Request) -> Response:
    """Whether it can answer: it has loaded, and its engine is alive. A server that drains still
    answers those it has."""
    server = server_of(request)
    is_good = server.phase in (Phase.READY, Phase.DRAINING, Phase.ASLEEP)
    return _status(server, 200 if is_good else 503)


async def live(request: Request) -> Response:
    """Whether the process is up; one that is not does not answer at all."""
    return _status(server_of(request), 200)


async def ready(request: Request) -> Response:
    """Whether to send requests here."""
    server = server_of(request)
    return _status(server, 200 if server.phase is Phase.READY else 503)


def _status(server: ServerState, status: int) -> Response:
    headers = {"retry-after": str(RETRY_WHEN_UNAVAILABLE_S)} if status == 503 else {}
    body: dict[str, Any] = {"status": server.phase.value}
    if (progress := server.engine.progress) is not None:
        body["progress"] = dataclasses.asdict(progress)
    return JSONResponse(body, status, headers)


async def load(request: Request) -> Response:
    """How many sequences are alive here, running or waiting; as vLLM calls it."""
    loaded = server_of(request).loaded
    num_alive = 0 if loaded is None else loaded.concurrency.num_alive
    if (tenant := current_tenant()) is not None:
        num_alive = tenant.num_running
    return JSONResponse({"server_load": num_alive})


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    server = server_of(request)
    text = b""
    key = server.settings.metrics_key
    if server.tenants is not None:
        # Counts of adapters and loads would tell a tenant of others.
        keys = [item for item in (key, server.settings.admin_key) if item is not None]
        if not any(brings(request.scope, item) for item in keys):
            raise HTTPException(401, "With --keys-file, /metrics needs the metrics or admin key.")
        key = None
    if server.loaded is not None:
        text = server.loaded.metrics.render(
            read_timeouts=server.read_timeouts,
            num_api_restarts=server.num_api_restarts,
            with_adapters=key is None or brings(request.scope, key),
        )
    return Response(text, media_type=_METRICS_TYPE)


async def list_models(request: Request) -> Response:
    service = server_of(request).service
    adapters = [_adapter(service, adapter) for adapter in service.adapters.all()]
    base = [_base(service)] if service.adapters.has_base else []
    cards = [*base, *adapters]
    ends = (cards[0].id, cards[-1].id) if cards else (None, None)
    return json_response(ModelList(cards, first_id=ends[0], last_id=ends[1]))


async def show_model(request: Request) -> Response:
    if not request.path_params["name"]:
        raise HTTPException(404)  # a slash too many
    service = server_of(request).service
    named = request.path_params["name"]
    name = service.adapters.resolve(named)
    if name is None:
        return json_response(_base(service))
    adapter = service.adapters.get(name)
    if adapter is None:  # it may be found, or be a revision, when a request names it
        raise HTTPException(404, f"The model {named[:200]!r} does not exist.")
    return json_response(_adapter(service, adapter))


def _base(service: Service) -> ModelCard:
    info = service.engine.info
    return ModelCard(
        id=service.model_name,
        display_name=service.model_name,
        created=service.created,
        created_at=_moment(service.created),
        root=info.model_name,
        max_model_len=info.max_model_len,
    )


def _adapter(service: Service, adapter: KnownAdapter) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        display_name=adapter.name,
        created=adapter.created,
        created_at=_moment(adapter.created),
        root=adapter.path,
        parent=adapter.parent or service.model_name,
        max_model_len=service.engine.info.max_model_len,
    )


def _moment(created: int) -> datetime:
    return datetime.fromtimestamp(created, UTC)
