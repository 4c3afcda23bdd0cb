"""KV events over ZMQ: what routers read, and what they can ask for again."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from manyroots import SamplingParams
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.keys import short_hash
from manyroots.engine.kv_events import EventBatch, EventPublisher, to_wire
from manyroots.errors import ConfigError
from manyroots.ids import AdapterDigest, AdapterName, Namespace, Tier
from manyroots.kv_configs import EventsChoice
from tests.helpers.patience import PATIENCE_S
from tests.soaks import kv_events
from tests.unit.test_llm_windows import serve


def test_k01_k02_a_consumer_that_misses_messages_mirrors_the_index(tmp_path: Path) -> None:
    """K01, K02: a slice; `python -m tests.soaks.kv_events` has 100,000 events."""
    told = kv_events.run(2500, 1, str(tmp_path))
    assert told["replayed"] >= told["lost"] == 100


def test_k01_events_have_the_form_that_routers_read() -> None:
    """K01: maps with a type and vLLM's names, in an array of time, events and rank."""
    namespace = Namespace(AdapterDigest(b"d" * 32), "salt")
    tokens = np.array([5, 6, 7, 8], np.int32).tobytes()
    stored = PagesStored(Tier.HOST, namespace, 1, b"p" * 32, (b"h" * 32, b"i" * 32), tokens)
    removed = PagesRemoved(Tier.DEVICE, namespace, 0, (b"h" * 32,))
    wired = [to_wire(event, 2, lambda digest: AdapterName("legal")) for event in (stored, removed)]
    payload = msgspec.msgpack.encode(EventBatch(1.5, wired, 0))  # type: ignore[arg-type]
    key = [(b"d" * 32).hex(), "salt", 1]
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            {
                "type": "BlockStored", "block_hashes": [short_hash(h) for h in stored.hashes],
                "parent_block_hash": short_hash(b"p" * 32), "token_ids": [5, 6, 7, 8],
                "block_size": 2, "lora_id": None, "medium": "CPU", "lora_name": "legal",
                "extra_keys": [key, key], "cache_salt": "salt",
            },
            {"type": "BlockRemoved", "block_hashes": [short_hash(b"h" * 32)], "medium": "GPU"},
        ],
        0,
    ]  # fmt: skip


def test_k01_an_engine_publishes_what_it_has(tmp_path: Path) -> None:
    """K01: through the engine, with a host tier."""
    choice = {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
    }  # fmt: skip
    rng = random.Random(1)
    prompt = [rng.randrange(3, 300) for _ in range(41)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"kv_events_config": json.dumps(choice), "num_host_pages": 50}
    with serve(tmp_path / "model", "full", **settings) as llm:
        llm.generate([prompt], greedy)
        seen = replayed(str(choice["replay_endpoint"]), llm._loop)
    assert seen[0] == {"type": "AllBlocksCleared"}
    for medium in ("GPU", "CPU"):
        stored = [e for e in seen[1:] if e["type"] == "BlockStored" and e["medium"] == medium]
        tokens = [token for event in stored for token in event["token_ids"]]
        assert tokens[:40] == prompt[:40]
        assert stored[0]["parent_block_hash"] is None


def replayed(endpoint: str, loop: Any) -> list[dict[str, Any]]:
    """All that an engine has published, the last of it included, which a thread sends in its own
    time."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    deadline = time.monotonic() + PATIENCE_S
    last = -1
    while last < loop._events._next - 1:
        assert time.monotonic() < deadline, f"message {last} stays the last one"
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        seen: list[dict[str, Any]] = []
        while (frames := socket.recv_multipart())[-1]:
            last = int.from_bytes(frames[-2], "big")
            seen += msgspec.msgpack.decode(frames[-1])[1]
    context.destroy(linger=0)
    return seen


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://*")
    with pytest.raises(ConfigError, match=f"tcp://\\*:{port} or None can't be opened"):
        EventPublisher(EventsChoice(f"tcp://*:{port}"), 4, lambda digest: None)
    context.destroy(linger=0)
