"""A server of a tiny model with adapters, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.conftest import API_KEY, HEADERS, Server, running
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters

ADMIN = {"authorization": "Bearer the-admin"}
MODEL = "tiny"
PAGE_SIZE = 4
MAX_RANK = 512


@dataclass(frozen=True)
class Pages:
    """The counts of /metrics at one moment."""

    total: int
    free: int
    cached: int
    held: int


@dataclass(frozen=True)
class AdapterServer:
    """The endpoints, in few words. One client for all threads: making one takes long."""

    server: Server
    client: httpx.Client

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> httpx.Response:
        headers = HEADERS if headers is None else headers
        return self.client.post(path, json=body, headers=headers)

    def complete(
        self, model: str, prompt: list[int], count: int = 8, **more: Any
    ) -> httpx.Response:
        return self.post("/v1/completions", completion(model, prompt, count) | more)

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a completion."""
        body = body | {"stream": True}
        with self.client.stream("POST", "/v1/completions", json=body, headers=HEADERS) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path} | more
        return self.post("/v1/load_lora_adapter", body, ADMIN)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name}, ADMIN)

    def names(self) -> list[str]:
        answer = self.client.get("/v1/models", headers=HEADERS)
        return [model["id"] for model in answer.json()["data"]]

    def on_tier(self, tier: str) -> float:
        """How many adapters a tier has."""
        text = self.server.get("/metrics").text
        found = re.search(rf'^manyroots:adapters{{.*tier="{tier}"}} (\S+)$', text, re.M)
        assert found is not None, text
        return float(found[1])

    def pages(self) -> Pages:
        text = self.client.get("/metrics", headers=HEADERS).text
        found = dict(re.findall(r"^manyroots:pages_(\w+){.*} (\S+)$", text, re.M))
        return Pages(**{kind: int(float(value)) for kind, value in found.items()})

    def assert_balance(self) -> None:
        """The engine is idle: no page is held, no page is lost, and no adapter is being loaded or
        unloaded."""
        self.server.wait_until_idle()
        for name in ("adapter_running", "adapter_loading", "adapter_draining"):
            self.server.wait_for(f"manyroots:{name}", lambda value: value == 0)
        pages = self.pages()
        assert pages.free + pages.cached == pages.total

    def assert_empty_after_unloading_all(self) -> None:
        for name in self.names():
            if name != MODEL:
                assert self.unload(name).status_code == 200
        self.assert_balance()
        self.server.wait_for("manyroots:adapter_slots_used", lambda value: value == 0)
        assert [self.on_tier(tier) for tier in ("device", "host", "storage")] == [0, 0, 0]


def completion(model: str, prompt: list[int], count: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextlib.contextmanager
def serving(
    tiny: TinyAdapters, *modules: str, env: dict[str, str] | None = None, **flags: int | str
) -> Iterator[AdapterServer]:
    """`modules` are `name=folder`; two slots, host memory for three, small pages."""
    given = {"max-loras": 2, "max-cpu-loras": 3, "num-gpu-blocks-override": 512} | flags
    numbers = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with running(
        str(tiny.model), "--served-model-name", MODEL, "--api-key", API_KEY,
        "--block-size", str(PAGE_SIZE), "--max-num-seqs", "40", "--max-lora-rank", str(MAX_RANK),
        *numbers, "--enable-lora", *(["--lora-modules", *modules] if modules else []),
        "--enable-lora-endpoints", "--admin-key", "the-admin", "--lora-dirs", str(tiny.dirs),
        env=env,
    ) as server:  # fmt: skip
        server.wait_until_ready()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:
            yield AdapterServer(server, client)
