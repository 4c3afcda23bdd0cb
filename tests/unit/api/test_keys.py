"""R05: whether a key is right is `hmac.compare_digest`'s verdict alone, over bytes, which takes as
long for a wrong key as for a right one."""

from __future__ import annotations

import hmac

import httpx
import pytest

from manyroots.config import LoraSettings
from tests.unit.api.harness import Harness

pytestmark = pytest.mark.anyio

KEYS = {
    "ascii": ("the-api-key", "the-admin-key"),
    "other": ("ключ-schlüssel-鍵", "zugang-日本語-ü"),
}


async def ask(server: Harness, path: str, key: bytes | None) -> httpx.Response:
    headers = {} if key is None else {b"authorization": b"Bearer " + key}
    if path == "/v1/models":
        return await server.get(path, headers=headers)
    return await server.post(path, {"lora_name": "a", "lora_path": "/nowhere"}, headers=headers)


def server(kind: str) -> Harness:
    api_key, admin_key = KEYS[kind]
    lora = LoraSettings(enable_lora=True)
    return Harness(lora=lora, api_key=api_key, admin_key=admin_key, enable_lora_endpoints=True)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/load_lora_adapter"])
async def test_r05_keys_are_compared_in_constant_time(
    kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R05: a verdict turned around turns every answer around, so nothing else was asked."""
    seen: list[tuple[bytes, bytes]] = []
    genuine = hmac.compare_digest

    def turned_around(given: bytes, key: bytes) -> bool:
        seen.append((given, key))
        return not genuine(given, key)

    api_key, admin_key = (key.encode() for key in KEYS[kind])
    right = admin_key if path.endswith("adapter") else api_key
    wrong = (b"x", right[:-1], right + b"x", right[:-1] + b"x")
    refused = (401, 403)
    assert (await ask(server(kind), path, right)).status_code not in refused
    for key in (None, b"", *wrong):
        assert (await ask(server(kind), path, key)).status_code in refused
    monkeypatch.setattr("manyroots.api.middleware.hmac.compare_digest", turned_around)
    assert (await ask(server(kind), path, right)).status_code in refused
    for key in wrong:
        assert (await ask(server(kind), path, key)).status_code not in refused
        assert (key, right) in seen
    assert all(type(given) is type(key) is bytes for given, key in seen)
