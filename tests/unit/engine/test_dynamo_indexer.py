"""Dynamo's own KV indexer reads our events, and keeps adapters and salts apart."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from manyroots import LLM, LoRARequest, SamplingParams
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.keys import Owner, PageHasher
from manyroots.engine.kv_events import EventPublisher
from manyroots.ids import AdapterDigest, AdapterName, Namespace, Tier
from manyroots.kv_configs import parse_events
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny_adapters import TinyAdapters

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
    """`python -m dynamo.indexer`, with one worker that publishes events as `config` says."""

    def __init__(self) -> None:
        port, events, replay = free_port(), free_port(), free_port()
        code = f"import dynamo._core as core; core.run_kv_indexer(['--port', '{port}'])"
        self.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        self.config = json.dumps({
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        })  # fmt: skip
        self._worker = {
            "instance_id": 1,
            "endpoint": f"tcp://127.0.0.1:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "model_name": "tiny",
            "block_size": PAGE_SIZE,
        }

    def listen(self, publish: Callable[[int], Sequence[int]]) -> None:
        """Until it hears the worker. It listens some time after it has answered, and misses what is
        published before: `publish` publishes once more, and gives the tokens of a page."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert self.client.post("/register", json=self._worker).status_code == 201
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        for attempt in itertools.count():
            if self.num_cached(publish(attempt), lora_name="first"):
                return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def num_cached(self, tokens: Sequence[int] = TOKENS.tolist(), **asked: str) -> int:
        body = {"model_name": "tiny", "token_ids": list(tokens), **asked}
        answer = self.client.post("/query", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["scores"].get("1", {}).get("0", 0))

    def wait_for(self, num_tokens: int, **asked: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.num_cached(**asked)) != num_tokens:
            assert time.monotonic() < deadline, (asked, found)
            time.sleep(0.05)

    def close(self) -> None:
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


@pytest.fixture
def publisher(indexer: Indexer) -> Iterator[EventPublisher]:
    choice = parse_events(indexer.config)
    assert choice is not None
    publisher = EventPublisher(choice, PAGE_SIZE, NAMES.get)
    try:
        yield publisher
    finally:
        publisher.close()


def test_m05_dynamos_indexer_keeps_adapters_and_salts_apart(
    indexer: Indexer, publisher: EventPublisher
) -> None:
    """M05: the same tokens in five namespaces, each with as many pages as no other."""

    def publish(_: int) -> list[int]:
        publisher.publish([stored(Namespace(FIRST, None), 1)])
        return TOKENS[:PAGE_SIZE].tolist()

    indexer.listen(publish)
    salted = Namespace(PIRATE, "tenant")
    publisher.publish([stored(salted, 1)])
    indexer.wait_for(16, lora_name="pirate", cache_salt="tenant")
    assert indexer.num_cached() == indexer.num_cached(lora_name="pirate") == 0
    publisher.publish([stored(Namespace(BUTLER, None), 2)])
    indexer.wait_for(32, lora_name="butler")
    assert indexer.num_cached() == indexer.num_cached(lora_name="pirate") == 0
    publisher.publish([stored(Namespace(PIRATE, None), 3)])
    publisher.publish([stored(Namespace(None, None), 4)])
    indexer.wait_for(64)
    assert indexer.num_cached(lora_name="pirate") == 48
    assert indexer.num_cached(lora_name="butler") == 32
    assert indexer.num_cached(lora_name="pirate", cache_salt="tenant") == 16
    assert indexer.num_cached(lora_name="pirate", cache_salt="another") == 0
    assert indexer.num_cached(lora_name="unknown") == 0
    gone = PagesRemoved(
        Tier.DEVICE, Namespace(PIRATE, None), 0, hashes(Namespace(PIRATE, None), 3)[1:]
    )
    publisher.publish([gone])
    indexer.wait_for(16, lora_name="pirate")
    assert indexer.num_cached() == 64


def test_m05_dynamos_indexer_reads_an_engine_with_two_adapters_and_a_salt(
    indexer: Indexer, tmp_path: Path
) -> None:
    """M05: an engine computes the same tokens in four namespaces, each to another length."""
    tiny = TinyAdapters(tmp_path)
    folders = {"first": "few", "pirate": "all", "butler": "other"}
    adapters = {
        name: LoRARequest(name, number, tiny.path(folder))
        for number, (name, folder) in enumerate(folders.items(), 1)
    }
    one = SamplingParams(temperature=0, max_tokens=1)
    with LLM(
        str(tiny.model), enable_lora=True, dtype="float32", block_size=PAGE_SIZE,
        num_gpu_blocks_override=64, kv_events_config=indexer.config,
    ) as llm:  # fmt: skip

        def compute(tokens: list[int], name: str | None, salt: str | None) -> None:
            prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
            llm.generate([prompt], one, lora_request=adapters[name] if name else None)

        def publish(attempt: int) -> list[int]:
            tokens = [100 + attempt % 100] * PAGE_SIZE
            compute([*tokens, 1], "first", None)
            return tokens

        indexer.listen(publish)
        lengths = {
            ("pirate", "tenant"): 1,
            ("butler", None): 2,
            ("pirate", None): 3,
            (None, None): 4,
        }
        for (name, salt), num_pages in lengths.items():
            compute([*TOKENS[: num_pages * PAGE_SIZE].tolist(), 1], name, salt)
        indexer.wait_for(4 * PAGE_SIZE)
        for (name, salt), num_pages in lengths.items():
            asked = {"lora_name": name, "cache_salt": salt}
            given = {key: value for key, value in asked.items() if value is not None}
            indexer.wait_for(num_pages * PAGE_SIZE, **given)
        assert indexer.num_cached(lora_name="first") == 0
        assert indexer.num_cached(lora_name="butler", cache_salt="tenant") == 0
        assert indexer.num_cached(cache_salt="tenant") == 0
