"""POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, as vLLM names them.

Only there if --enable-lora-endpoints is given, and only for the admin key (`middleware.py`). The
engine reads, checks and answers; here the names that callers may use are kept up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from manyroots.adapter_names import name_fault
from manyroots.api.body import read_request
from manyroots.api.endpoints import post
from manyroots.api.events import json_response
from manyroots.api.requests import LoadLoraRequest, UnloadLoraRequest
from manyroots.api.responses import LoraLoaded, LoraUnloaded
from manyroots.api.state import Service, server_of
from manyroots.errors import NotFoundError, RequestError
from manyroots.ids import AdapterName


async def load_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, LoadLoraRequest, max_bytes=server.settings.max_body_bytes)
    return await _to_the_end(_load(server.accepting, body))


async def unload_lora_adapter(request: Request) -> Response:
    server = server_of(request)
    body = await read_request(request, UnloadLoraRequest, max_bytes=server.settings.max_body_bytes)
    return await _to_the_end(_unload(server.accepting, body.lora_name))


async def _to_the_end(work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """The answer, or none if its client has gone; the names are brought up to date either way."""
    return json_response(await asyncio.shield(asyncio.ensure_future(work)))


async def _load(service: Service, request: LoadLoraRequest) -> LoraLoaded:
    if fault := name_fault(request.lora_name):
        raise RequestError(fault, field="lora_name")
    reply = await service.engine.load_adapter(
        AdapterName(request.lora_name),
        request.lora_path,
        is_pinned=bool(request.pinned),
        in_place=bool(request.load_inplace),
    )
    service.adapters.add(request.lora_name, reply.path)
    return LoraLoaded(
        lora_name=request.lora_name,
        lora_path=reply.path,
        status="unchanged" if reply.is_unchanged else "loaded",
        rank=reply.rank,
        num_bytes=reply.num_bytes,
        digest=reply.digest,
        modules=list(reply.modules),
        pinned=bool(request.pinned),
    )


async def _unload(service: Service, name: str) -> LoraUnloaded:
    # New requests are refused from now on, not only when the engine has answered.
    removed = service.adapters.remove(name)
    try:
        reply = await service.engine.unload_adapter(AdapterName(name))
    except Exception as error:
        if removed is not None and not isinstance(error, NotFoundError):
            service.adapters.put_back(removed)
        raise
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
        post(
            f"{version}/unload_lora_adapter", unload_lora_adapter, "Unload an adapter.",
            UnloadLoraRequest, LoraUnloaded, is_admin=True,
        ),
    )
]  # fmt: skip
