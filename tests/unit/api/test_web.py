"""What stands between this server and browsers, proxies and wires: CORS, a root path, TLS (G10)."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from manyroots.api.server import check_certificates
from manyroots.config import LoraSettings
from manyroots.errors import ConfigError
from manyroots.server_config import ServerSettings
from tests.helpers.patience import PATIENCE_S
from tests.unit.api.harness import Harness, error_of
from tests.unit.api.test_server_life import BODY, Life

pytestmark = pytest.mark.anyio

ORIGIN = "https://a.example"
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def preflight(**settings: Any) -> httpx.Response:
    async with Harness(**settings).client as client:
        return await client.options(CHAT, headers=PREFLIGHT)


@pytest.mark.parametrize("origins", [("*",), ("https://b.example", ORIGIN)])
async def test_g10_a_page_of_an_allowed_origin_may_call(origins: tuple[str, ...]) -> None:
    """Its browser asks first, without the key, and may read the errors."""
    settings: dict[str, Any] = {"allowed_origins": origins, "api_key": "k"}
    asked = await preflight(**settings)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    response = await Harness(**settings).get("/v1/models", headers={"origin": ORIGIN})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] in ("*", ORIGIN)


@pytest.mark.parametrize("origins", [(), ("https://b.example",)])
async def test_g10_a_page_of_another_origin_may_not(origins: tuple[str, ...]) -> None:
    asked = await preflight(allowed_origins=origins)
    assert asked.status_code >= 400
    assert "access-control-allow-origin" not in asked.headers
    response = await Harness(allowed_origins=origins).get("/v1/models", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


async def test_g10_a_root_path_may_be_left_on_or_taken_off_by_the_proxy() -> None:
    harness = Harness(root_path="/llm", api_key="k")
    for prefix in ("/llm", ""):
        assert (await harness.get(f"{prefix}/health")).status_code == 200
        assert (await harness.get(f"{prefix}/v1/models")).status_code == 401
        headers = {"authorization": "Bearer k"}
        assert (await harness.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
    for path in ("/llmx/health", "/llm/llm/health", "/llm"):
        assert (await harness.get(path, headers=headers)).status_code == 404


async def test_g10_the_admins_paths_are_his_behind_a_root_path_too() -> None:
    lora = LoraSettings(enable_lora=True)
    settings: dict[str, Any] = {"admin_key": "a", "api_key": "k", "enable_lora_endpoints": True}
    harness = Harness(root_path="/llm", lora=lora, **settings)
    body = {"lora_name": "a", "lora_path": "/x"}
    for prefix in ("/llm", ""):
        path = f"{prefix}/v1/load_lora_adapter"
        response = await harness.post(path, body, headers={"authorization": "Bearer k"})
        assert response.status_code == 403
        assert error_of(response)["message"]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("NOT RUN: TLS is not checked here, since there is no openssl to make a key")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


async def test_g10_https(tmp_path: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    life = Life(tmp_path, ssl_certfile=cert, ssl_keyfile=key)
    trusting = ssl.create_default_context(cafile=cert)

    async def script(_: httpx.AsyncClient) -> None:
        url = life.url.replace("http:", "https:")
        async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=PATIENCE_S) as client:
            await life.ready(client)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await httpx.AsyncClient(timeout=PATIENCE_S).get(f"{life.url}/health")
        signal.raise_signal(signal.SIGTERM)

    assert await life.run(script) == 0


def test_g10_a_certificate_that_cannot_be_used_is_told_at_start(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    check_certificates(ServerSettings())
    check_certificates(ServerSettings(ssl_certfile=cert, ssl_keyfile=key))
    for bad in ({"ssl_certfile": key}, {"ssl_certfile": str(tmp_path / "no"), "ssl_keyfile": key}):
        with pytest.raises(ConfigError, match="ssl-certfile"):
            check_certificates(ServerSettings(**bad))


async def test_g10_the_operators_limit_of_logprobs() -> None:
    harness = Harness(max_logprobs=2)
    assert (await harness.complete(logprobs=2)).status_code == 200
    assert (await harness.chat(logprobs=True, top_logprobs=2)).status_code == 200
    for response, field in (
        (await harness.complete(logprobs=3), "logprobs"),
        (await harness.complete(prompt_logprobs=3), "prompt_logprobs"),
        (await harness.chat(logprobs=True, top_logprobs=3), "top_logprobs"),
    ):
        assert response.status_code == 400
        assert error_of(response)["param"] == field


async def test_g05_load_and_ping() -> None:
    harness = Harness(api_key="k")
    assert (await harness.get("/ping")).status_code == 200
    assert (await harness.post("/ping", {})).status_code == 200
    assert (await Harness(loaded=False).get("/ping")).status_code == 503
    assert (await harness.get("/load")).status_code == 401
    response = await harness.get("/load", headers={"authorization": "Bearer k"})
    assert response.json() == {"server_load": 0}
