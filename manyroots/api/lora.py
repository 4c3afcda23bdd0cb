"""POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, as vLLM names them, and
POST /v1/upload_lora_adapter, which takes the files in its body.

Only there if --enable-lora-endpoints is given, and only for the admin key (`middleware.py`). The
engine reads, checks and answers; its client keeps the names that callers may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.adapter_names import name_fault
from manyroots.api.body import read_request
from manyroots.api.endpoints import Endpoint, post
from manyroots.api.events import json_response
from manyroots.api.requests import LoadLoraRequest, UnloadLoraRequest
from manyroots.api.responses import AdapterState, AdapterStates, LoraLoaded, LoraUnloaded
from manyroots.api.state import Service, server_of
from manyroots.api.tenants import current_tenant
from manyroots.engine.adapter_table import UPLOADED
from manyroots.errors import RequestError
from manyroots.ids import REVISION_DIGITS, AdapterName
from manyroots.messages import LoadLora, LoraReply
from manyroots.snapshot import AdapterView


async def load_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, LoadLoraRequest, max_bytes=server.settings.max_body_bytes)
    return await _to_the_end(_load(server.accepting, body))


async def unload_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, UnloadLoraRequest, max_bytes=server.settings.max_body_bytes)
    return await _to_the_end(_unload(server.accepting, body.lora_name))


async def list_adapters(request: Request) -> Response:
    """Which adapter is where; a limited key sees its own alone."""
    service = server_of(request).service
    seen = await service.engine.look()
    read = {view.name for view in seen.adapters if not view.is_draining}
    states = [_state(view) for view in seen.adapters if service.adapters.get(view.name)]
    for adapter in service.adapters.all():
        if adapter.name not in read:
            unread = AdapterView(
                adapter.name, "", "storage", "unread", False, False, 0, 0, 0, 0, 0, 0
            )
            states.append(_state(unread))
    return json_response(AdapterStates(states))


def _state(view: AdapterView) -> AdapterState:
    state = AdapterState(
        name=view.name,
        revision=view.digest,
        tier=view.tier,
        state=view.state,
        draining=view.is_draining,
        pinned=view.is_pinned,
        rank=view.rank,
        num_bytes=view.num_bytes,
        loads=view.num_loads,
        left=view.left or None,
        came_seconds=dict(view.came_s),
    )
    if current_tenant() is None:
        state.running, state.waiting = view.num_running, view.num_waiting
    else:
        state.state = "unread" if view.state == "unread" else "known"
    return state


async def _to_the_end(work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The answer, or none if its client has gone; the work is done either way."""
    return json_response(await asyncio.shield(asyncio.ensure_future(work)))


async def _load(service: Service, request: LoadLoraRequest) -> LoraLoaded:
    if fault := name_fault(request.lora_name):
        raise RequestError(fault, field="lora_name")
    load = LoadLora(
        0,
        AdapterName(request.lora_name),
        request.lora_path,
        is_pinned=bool(request.pinned),
        in_place=bool(request.load_inplace),
    )
    reply = await service.engine.load_adapter(load)
    return _loaded(load, reply.path, reply)


async def upload_lora_adapter(request: Request) -> Response:
    """The body is a tar archive of the two files; the name is in the query."""
    server = server_of(request)
    service = server.accepting
    name = request.query_params.get("lora_name", "")
    if fault := name_fault(name):
        raise RequestError(fault, field="lora_name")
    if name == service.model_name:
        raise RequestError(
            f"{name!r} is what the base model is called; give the adapter another name.",
            field="lora_name",
        )
    is_pinned = request.query_params.get("pinned", "false").lower() in ("1", "true")
    folder = await service.uploads.take(request)
    return await _to_the_end(_publish(service, name, folder, is_pinned))


async def _publish(service: Service, name: str, folder: Path, is_pinned: bool) -> LoraLoaded:
    """Requests that come from now on are the new revision's; those that run keep the old one."""
    load = LoadLora(0, AdapterName(name), str(folder), is_pinned, in_place=True, is_upload=True)
    try:
        reply = await service.engine.load_adapter(load)
    except BaseException:
        await service.uploads.discard(folder)
        raise
    await service.uploads.published(name, folder)
    return _loaded(load, UPLOADED, reply)


def _loaded(load: LoadLora, path: str, reply: LoraReply) -> LoraLoaded:
    return LoraLoaded(
        lora_name=load.name,
        lora_path=path,
        status="unchanged" if reply.is_unchanged else "loaded",
        rank=reply.rank,
        num_bytes=reply.num_bytes,
        digest=reply.digest,
        revision=reply.digest[:REVISION_DIGITS],
        modules=list(reply.modules),
        pinned=load.is_pinned,
    )


async def _unload(service: Service, name: str) -> LoraUnloaded:
    reply = await service.engine.unload_adapter(AdapterName(name))
    await service.uploads.published(name, None)
    service.metrics.adapters.forget(name)
    service.metrics.reuse.forget(name)
    return LoraUnloaded(
        lora_name=name,
        status="draining" if reply.num_requests else "unloaded",
        freed_pages=reply.num_pages,
        freed_bytes=reply.num_bytes,
        draining_requests=reply.num_requests,
    )


LORA_ENDPOINTS = [
    endpoint
    for version in ("/v1", "")
    for endpoint in (
        post(
            f"{version}/load_lora_adapter", load_lora_adapter, "Load an adapter.",
            LoadLoraRequest, LoraLoaded, is_admin=True,
        ),
        Endpoint(
            f"{version}/upload_lora_adapter", upload_lora_adapter,
            "Publish a revision of an adapter from a tar archive of its files.",
            answer=LoraLoaded, methods=("POST",), is_admin=True, needs_json=False,
        ),
        post(
            f"{version}/unload_lora_adapter", unload_lora_adapter, "Unload an adapter.",
            UnloadLoraRequest, LoraUnloaded, is_admin=True,
        ),
    )
]  # fmt: skip
