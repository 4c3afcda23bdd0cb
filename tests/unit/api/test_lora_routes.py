"""Loading and unloading over HTTP (S03): off by default, for the admin key, and what they say."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest

from manyroots.adapter_names import LoraModule
from manyroots.config import LoraSettings
from manyroots.messages import ErrorKind, LoadLora, LoraReply, UnloadLora
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.harness import Harness, error_of

pytestmark = pytest.mark.anyio

LORA = LoraSettings(
    enable_lora=True, lora_modules=(LoraModule("sql", "/dirs/sql"),), lora_dirs=("/dirs",)
)
ADMIN = {"authorization": "Bearer the-admin"}
PATHS = [f"{v}/{verb}_lora_adapter" for v in ("", "/v1") for verb in ("load", "unload")]


def harness(**settings: Any) -> Harness:
    enabled = {"enable_lora_endpoints": True, "admin_key": "the-admin"}
    return Harness(lora=LORA, **(enabled | settings))


async def load(server: Harness, name: str, path: str = "x", **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": path} | fields
    return await server.post("/v1/load_lora_adapter", body, headers=ADMIN)


async def unload(server: Harness, name: str) -> httpx.Response:
    return await server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)


async def names(server: Harness) -> list[str]:
    return [model["id"] for model in (await server.get("/v1/models")).json()["data"]]


@pytest.mark.parametrize("path", PATHS)
async def test_s03_the_endpoints_are_not_there_unless_enabled(path: str) -> None:
    """S03: not even for a caller that guesses the key."""
    server = Harness(lora=LORA, admin_key="the-admin")
    answer = await server.post(path, {"lora_name": "a", "lora_path": "b"}, headers=ADMIN)
    assert answer.status_code == 404
    assert server.engine.lora_ops == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic the-admin", 401),
        ("Bearer the-admin2", 401),
        ("Bearer ", 401),
        ("Bearer the-api-key", 403),
    ],
)
async def test_s03_only_the_admin_key_opens_them(
    path: str, header: str | None, status: int
) -> None:
    """S03: the API key is known, but not enough."""
    server = harness(api_key="the-api-key")
    headers = {} if header is None else {"authorization": header}
    answer = await server.post(path, {"lora_name": "a", "lora_path": "b"}, headers=headers)
    assert answer.status_code == status
    assert "admin key" in error_of(answer)["message"]
    assert server.engine.lora_ops == []


async def test_s03_two_authorization_headers_open_nothing() -> None:
    """S03"""
    server = harness()
    headers = [("authorization", "Bearer the-admin"), ("authorization", "Bearer the-admin")]
    answer = await server.post("/load_lora_adapter", {"lora_name": "a"}, headers=headers)
    assert answer.status_code == 401


async def test_s03_the_admin_key_is_no_api_key() -> None:
    """S03"""
    server = harness(api_key="the-api-key")
    assert (await server.get("/v1/models", headers=ADMIN)).status_code == 401


async def test_s03_a_host_header_opens_no_path() -> None:
    """S03"""
    server = harness(api_key="the-api-key")
    answer = await server.post(
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "b"},
        headers={"host": "x/health?"},
    )
    assert answer.status_code == 401


@pytest.mark.parametrize("version", ["", "/v1"])
async def test_s03_a_load_says_what_was_loaded_and_the_name_can_be_used(version: str) -> None:
    """S03"""
    server = harness()
    body = {"lora_name": "new", "lora_path": "folder", "pinned": True, "load_inplace": False}
    answer = await server.post(f"{version}/load_lora_adapter", body, headers=ADMIN)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "lora_adapter", "lora_name": "new", "lora_path": "folder", "status": "loaded",
        "rank": 8, "num_bytes": 4096, "digest": "ab" * 32, "revision": "ab" * 6,
        "modules": ["q_proj", "v_proj"],
        "pinned": True,
    }  # fmt: skip
    assert server.engine.lora_ops == [LoadLora(0, "new", "folder", True, False)]
    assert await names(server) == ["tiny", "sql", "new"]
    assert (await server.complete(model="new", max_tokens=1)).status_code == 200


async def test_s03_an_unload_says_what_was_freed_and_the_name_is_gone() -> None:
    """S03, N19"""
    server = harness()
    await server.complete(model="sql", max_tokens=1)
    answer = await unload(server, "sql")
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "lora_adapter", "lora_name": "sql", "status": "unloaded", "freed_pages": 7,
        "freed_bytes": 4096, "draining_requests": 0,
    }  # fmt: skip
    assert await names(server) == ["tiny"]
    assert (await server.complete(model="sql")).status_code == 404
    assert 'adapter="sql"' not in (await server.get("/metrics")).text, "its label is gone too"


async def test_w04_new_requests_are_refused_before_the_unload_is_answered() -> None:
    """W04"""
    server = harness()
    server.engine.lora_gate.clear()
    unloading = asyncio.create_task(unload(server, "sql"))
    while not server.engine.lora_ops:
        await asyncio.sleep(0)
    assert (await server.complete(model="sql")).status_code == 404
    server.engine.lora_rule = lambda op: LoraReply(op.op_id, num_requests=3)
    server.engine.lora_gate.set()
    answer = (await unloading).json()
    assert (answer["status"], answer["draining_requests"]) == ("draining", 3)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(ErrorKind.REQUEST, 400), (ErrorKind.NOT_FOUND, 404), (ErrorKind.ENGINE, 500)],
)
async def test_s03_what_the_engine_refuses_is_refused_with_its_reason(
    kind: ErrorKind, status: int
) -> None:
    """S03: and no name appears or, but for one that is unknown, goes."""
    server = harness()

    def refuse(op: LoadLora | UnloadLora) -> LoraReply:
        return LoraReply(op.op_id, error="r is 0; choose another", error_kind=kind)

    server.engine.lora_rule = refuse
    answer = await load(server, "new")
    assert answer.status_code == status
    if kind is not ErrorKind.ENGINE:
        assert "r is 0" in error_of(answer)["message"]
    assert (await unload(server, "sql")).status_code == status
    assert await names(server) == (["tiny"] if kind is ErrorKind.NOT_FOUND else ["tiny", "sql"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": 3, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "b", "pinned": "yes"}, "pinned"),
        ({"lora_name": "a", "lora_path": "b", "tensors": []}, "tensors"),
    ],
)
async def test_s03_malformed_bodies_name_the_field(body: dict[str, Any], param: str) -> None:
    """S03"""
    answer = await harness().post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


async def test_a_dead_or_draining_engine_loads_nothing() -> None:
    server = harness()
    server.state.is_draining = True
    assert (await load(server, "new")).status_code == 503
    server.state.is_draining = False
    server.engine.is_alive = False
    assert (await load(server, "new")).status_code == 503
    assert (await unload(server, "sql")).status_code == 503


async def test_a_client_that_goes_away_leaves_the_names_right() -> None:
    """The engine has loaded it all the same."""
    server = harness()
    server.engine.lora_gate.clear()
    loading = asyncio.create_task(load(server, "new"))
    while not server.engine.lora_ops:
        await asyncio.sleep(0)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    server.engine.lora_gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while "new" not in await names(server):
            await asyncio.sleep(0)


async def test_m05_the_calls_of_the_adapter_syncer_load_and_unload() -> None:
    """M05: what the inference extension's sidecar sends, in its order. It knows no keys; its HTTP
    library takes a password from a netrc file."""
    server = harness()
    netrc = {"authorization": "Basic " + base64.b64encode(b"syncer:the-admin").decode()}
    assert (await server.get("/health", headers=netrc)).status_code == 200
    listed = (await server.get("/v1/models", headers=netrc)).json()["data"]
    assert "extra" not in [model["id"] for model in listed]
    body = {"lora_name": "extra", "lora_path": "/dirs/extra", "base_model_name": "base"}
    loaded = await server.post("/v1/load_lora_adapter", body, headers=netrc)
    assert loaded.status_code == 200, loaded.text
    assert "extra" in await names(server)
    gone = await server.post("/v1/unload_lora_adapter", {"lora_name": "extra"}, headers=netrc)
    assert gone.status_code == 200, gone.text
    assert "extra" not in await names(server)
    wrong = {"authorization": "Basic " + base64.b64encode(b"the-admin:").decode()}
    refused = await server.post("/v1/load_lora_adapter", body, headers=wrong)
    assert refused.status_code == 401
