"""Routes that say what this server is and how it does: models, health, metrics, version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manyroots.api.adapters import Adapter
from manyroots.api.errors import RETRY_WHEN_UNAVAILABLE_S
from manyroots.api.events import json_response
from manyroots.api.responses import Model, ModelList
from manyroots.api.state import Phase, Service, server_of
from manyroots.version import __version__

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: Request) -> Response:
    """Live: worth keeping. Only a dead engine makes it worth a restart."""
    phase = server_of(request).phase
    return _status(phase, 503 if phase is Phase.DEAD else 200)


async def ready(request: Request) -> Response:
    """Whether to send requests here."""
    phase = server_of(request).phase
    return _status(phase, 200 if phase is Phase.READY else 503)


def _status(phase: Phase, status: int) -> Response:
    headers = {"retry-after": str(RETRY_WHEN_UNAVAILABLE_S)} if status == 503 else {}
    return JSONResponse({"status": phase.value}, status, headers)


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    service = server_of(request).loaded
    text = service.metrics.render() if service is not None else b""
    return Response(text, media_type=_METRICS_TYPE)


async def list_models(request: Request) -> Response:
    service = server_of(request).service
    adapters = [_adapter(service, adapter) for adapter in service.adapters.all()]
    return json_response(ModelList([_base(service), *adapters]))


async def show_model(request: Request) -> Response:
    service = server_of(request).service
    name = service.adapters.resolve(request.path_params["name"])
    adapter = None if name is None else service.adapters.get(name)
    return json_response(_base(service) if adapter is None else _adapter(service, adapter))


def _base(service: Service) -> Model:
    info = service.engine.info
    return Model(
        id=service.model_name,
        created=service.created,
        root=info.model_name,
        max_model_len=info.max_model_len,
    )


def _adapter(service: Service, adapter: Adapter) -> Model:
    return Model(
        id=adapter.name,
        created=adapter.created,
        root=adapter.path,
        parent=adapter.parent,
        max_model_len=service.engine.info.max_model_len,
    )
