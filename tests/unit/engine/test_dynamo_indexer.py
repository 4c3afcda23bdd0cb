"""Dynamo's own KV indexer reads our events, and keeps adapters and salts apart."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.keys import Owner, PageHasher
from manyroots.engine.kv_events import EventPublisher
from manyroots.ids import AdapterDigest, AdapterName, Namespace, Tier
from manyroots.kv_configs import parse_events
from tests.helpers.patience import PATIENCE_S

pytest.importorskip("dynamo._core")

PAGE_SIZE = 16
TOKENS = np.arange(4 * PAGE_SIZE, dtype=np.int32)
PIRATE, BUTLER, FIRST = (AdapterDigest(letter * 32) for letter in (b"a", b"b", b"c"))
NAMES = {
    PIRATE: AdapterName("pirate"), BUTLER: AdapterName("butler"), FIRST: AdapterName("first")
}  # fmt: skip
HASHER = PageHasher(b"", 4 * PAGE_SIZE)


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


class Indexer:
    """`python -m dynamo.indexer`, with our publisher as its worker."""

    def __init__(self) -> None:
        port, events, replay = free_port(), free_port(), free_port()
        code = f"import dynamo._core as core; core.run_kv_indexer(['--port', '{port}'])"
        self.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        choice = parse_events(json.dumps(config))
        assert choice is not None
        self.publisher = EventPublisher(choice, PAGE_SIZE, NAMES.get)
        worker = {
            "instance_id": 1,
            "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "model_name": "tiny",
            "block_size": PAGE_SIZE,
        }
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert self.client.post("/register", json=worker).status_code == 201
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        # It listens some time after it has answered, and misses what is published before.
        while self.num_cached(lora_name="first") == 0:
            assert time.monotonic() < deadline
            self.publisher.publish([stored(Namespace(FIRST, None), 1)])
            time.sleep(0.1)

    def num_cached(self, **asked: str) -> int:
        body = {"model_name": "tiny", "token_ids": TOKENS.tolist(), **asked}
        answer = self.client.post("/query", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["scores"].get("1", {}).get("0", 0))

    def wait_for(self, num_tokens: int, **asked: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.num_cached(**asked)) != num_tokens:
            assert time.monotonic() < deadline, (asked, found)
            time.sleep(0.05)

    def close(self) -> None:
        self.publisher.close()
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    indexer = Indexer()
    try:
        yield indexer
    finally:
        indexer.close()


def hashes(namespace: Namespace, num_pages: int) -> tuple[bytes, ...]:
    keys = TOKENS[: num_pages * PAGE_SIZE].tobytes()
    return tuple(HASHER.chain(HASHER.root, Owner(namespace, 0), keys))


def stored(namespace: Namespace, num_pages: int) -> PagesStored:
    keys = TOKENS[: num_pages * PAGE_SIZE].tobytes()
    return PagesStored(Tier.DEVICE, namespace, 0, None, hashes(namespace, num_pages), keys)


def test_m05_dynamos_indexer_keeps_adapters_and_salts_apart(indexer: Indexer) -> None:
    """M05: the same tokens in five namespaces, each with as many pages as no other."""
    salted = Namespace(PIRATE, "tenant")
    indexer.publisher.publish([stored(salted, 1)])
    indexer.wait_for(16, lora_name="pirate", cache_salt="tenant")
    assert indexer.num_cached() == indexer.num_cached(lora_name="pirate") == 0
    indexer.publisher.publish([stored(Namespace(BUTLER, None), 2)])
    indexer.wait_for(32, lora_name="butler")
    assert indexer.num_cached() == indexer.num_cached(lora_name="pirate") == 0
    indexer.publisher.publish([stored(Namespace(PIRATE, None), 3)])
    indexer.publisher.publish([stored(Namespace(None, None), 4)])
    indexer.wait_for(64)
    assert indexer.num_cached(lora_name="pirate") == 48
    assert indexer.num_cached(lora_name="butler") == 32
    assert indexer.num_cached(lora_name="pirate", cache_salt="tenant") == 16
    assert indexer.num_cached(lora_name="pirate", cache_salt="another") == 0
    assert indexer.num_cached(lora_name="unknown") == 0
    gone = PagesRemoved(
        Tier.DEVICE, Namespace(PIRATE, None), 0, hashes(Namespace(PIRATE, None), 3)[1:]
    )
    indexer.publisher.publish([gone])
    indexer.wait_for(16, lora_name="pirate")
    assert indexer.num_cached() == 64
