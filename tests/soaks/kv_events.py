"""A router that knows nothing but KV events mirrors what an engine's cache has (K01, K02).

    python -m tests.soaks.kv_events [--events 100000] [--seed 0]

Random requests of several namespaces go through a real prefix cache with a host tier, whose events
are published over ZMQ. The consumer loses a run of messages on purpose, sees the gap by their
numbers and asks for them again. In between and at the end its pages, their tokens and parents are
those of the cache's index, exactly. Prints JSON: what was published, missed and replayed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from typing import Any

import msgspec
import numpy as np
import zmq

from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey, short_hash
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import ABSENT, CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.engine.kv_events import END, MEDIA, EventPublisher
from manyroots.ids import HASH_BYTES, AdapterDigest, AdapterName, Namespace, StepId
from manyroots.kv_configs import EventsChoice
from manyroots.step import CopyDone
from tests.helpers.patience import PATIENCE_S

PAGE, NUM_LOST = 4, 100
Mirrored = dict[str, dict[int, tuple[tuple[int, ...], int | None]]]
"""By medium and hash: a page's tokens and its parent."""


class Traffic:
    """Random requests through a cache, one after the other."""

    def __init__(self, seed: int, num_pages: int = 200, num_host_pages: int = 500) -> None:
        self._rng = random.Random(seed)
        capacity = Capacity(FULL_ATTENTION, num_pages, num_host_pages)
        policies = CachePolicies(records_events=True, identity=b"test")
        self.cache = PrefixCache(CacheLayout.of(PAGE, (capacity,)), policies)
        digests = [None, AdapterDigest(b"a" * 32), AdapterDigest(b"b" * 32)]
        self._namespaces = [Namespace(digest, salt) for digest in digests for salt in (None, "x")]
        self._known: list[np.ndarray[Any, Any]] = [np.zeros(0, np.int32)]
        self._step = 0

    def request(self) -> None:
        """A prompt that may begin as an earlier one did; sometimes its step fails."""
        rng, cache = self._rng, self.cache
        begin = self._known[rng.randrange(len(self._known))]
        begin = begin[: rng.randint(0, len(begin))]
        fresh = np.array([rng.randrange(50) for _ in range(rng.randint(1, 40))], np.int32)
        tokens = np.concatenate([begin, fresh])[:120].astype(np.int32)
        self._known = [*self._known[-300:], tokens]
        key = PrefixKey(rng.choice(self._namespaces))
        lease = cache.claim(key, tokens, len(tokens), may_reuse=True)
        if lease.onboarding and cache.onboard(lease) is None:
            self._settle()
        self._step += 1
        step = StepId(self._step)
        computed = lease.num_cached_tokens
        is_good = not lease.onboarding and not lease.has_failed
        if is_good and not isinstance(cache.extend(lease, computed, len(tokens), step), Refusal):
            cache.begin(lease, len(tokens))
            cache.announce(lease, tokens, len(tokens), step)
            if rng.random() < 0.05:
                cache.release(lease, Ending.DROPPED)
                cache.fail_step(step)
                return
            cache.commit_step(step)
            cache.commit(lease, tokens, len(tokens), step)
        cache.release(lease, Ending.FINISHED)
        if rng.random() < 0.5:
            self._settle()
        if rng.random() < 0.002:
            cache.evict_namespace(rng.choice(self._namespaces))

    def _settle(self) -> None:
        """Copies end; some units do not arrive."""
        while self.cache.has_transfers:
            for copy in self.cache.take_copies():
                arrived = np.array([self._rng.random() < 0.97 for _ in copy.target_units], np.bool_)
                self.cache.acknowledge(CopyDone(copy.copy_id, arrived))


def resident(cache: PrefixCache) -> Mirrored:
    """What the index of a cache has that records events."""
    found: Mirrored = {"GPU": {}, "CPU": {}}
    index = cache.index
    for node in index.tree.nodes():
        assert node.parent is not None
        pages = np.frombuffer(bytes(node.keys), np.int32).reshape(-1, cache.page_size)
        before = node.parent.hashes[-HASH_BYTES:]
        parent = short_hash(before) if node.parent.num_pages else None
        for place, tokens in enumerate(pages.tolist()):
            number = short_hash(index.hash_of(node, place))
            for plane, tier in index._event_planes.items():
                if node.units[plane][place] != ABSENT:
                    found[MEDIA[tier]][number] = (tuple(tokens), parent)
            parent = number
    return found


class Consumer:
    """Subscribes, and asks for what it has missed."""

    def __init__(self, endpoint: str, replay: str, topic: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._topic = topic
        self.pages: Mirrored = {"GPU": {}, "CPU": {}}
        self.next = 0
        self.num_events = self.num_lost = self.num_replayed = 0
        self.names: set[str | None] = set()
        self.lose = 0
        """So many messages to come are lost on the way."""

    def catch_up(self, last: int) -> None:
        """Take messages until this number has come; a gap is asked for."""
        deadline = time.monotonic() + PATIENCE_S
        while self.next <= last:
            assert time.monotonic() < deadline, f"{self.next} of {last} messages came"
            if not self._socket.poll(200):
                self._ask()  # the last ones may be those that were lost
                continue
            topic, number, payload = self._socket.recv_multipart()
            assert topic == self._topic
            if self.lose:
                self.lose -= 1
                self.num_lost += 1
                continue
            if int.from_bytes(number, "big") > self.next:
                self._ask()
            self._take(int.from_bytes(number, "big"), payload)

    def _ask(self) -> None:
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, topic, number, payload = self._replay.recv_multipart()
            if number == END:
                return
            assert topic == self._topic
            self.num_replayed += 1
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return  # replayed already
        assert number == self.next, f"message {number} came in place of {self.next}"
        self.next += 1
        when, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        assert abs(time.time() - when) < 3600
        for event in events:
            self.num_events += 1
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind == "AllBlocksCleared":
            for pages in self.pages.values():
                pages.clear()
            return
        pages = self.pages[event["medium"]]
        if kind == "BlockRemoved":
            for number in event["block_hashes"]:
                del pages[number]
            return
        assert kind == "BlockStored"
        parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
        assert size == PAGE
        assert event["lora_id"] is None
        self.names.add(event["lora_name"])
        extra = event.get("extra_keys")
        assert extra is None or len(extra) == len(event["block_hashes"])
        for index, number in enumerate(event["block_hashes"]):
            assert number not in pages, "stored twice"
            pages[number] = (tuple(tokens[index * size : (index + 1) * size]), parent)
            parent = number

    def close(self) -> None:
        self._context.destroy(linger=0)


def run(num_events: int, seed: int, folder: str) -> dict[str, int]:
    """Mirror so many events, with a gap in the middle."""
    traffic = Traffic(seed)
    choice = EventsChoice(
        f"ipc://{folder}/events", f"ipc://{folder}/replay", topic="kv", buffer_steps=num_events
    )
    names = {b"a" * 32: AdapterName("first"), b"b" * 32: AdapterName("second")}
    publisher = EventPublisher(choice, PAGE, lambda digest: names.get(bytes(digest)))
    consumer = Consumer(choice.endpoint, choice.replay_endpoint or "", b"kv")
    last = 0
    has_lost = False
    try:
        # Lost messages are counted as they come, which may be after their replay.
        while consumer.num_events < num_events or consumer.num_lost < NUM_LOST:
            for _ in range(200):
                traffic.request()
                events = traffic.cache.take_events()
                publisher.publish(events)
                last += bool(events)
            if not has_lost and consumer.num_events >= num_events // 2:
                consumer.lose, has_lost = NUM_LOST, True
            consumer.catch_up(last)
            assert consumer.pages == resident(traffic.cache)
    finally:
        publisher.close()
        consumer.close()
    assert consumer.num_lost == NUM_LOST
    assert consumer.num_replayed >= NUM_LOST
    assert consumer.names == {None, "first", "second"}
    assert all(consumer.pages.values())
    return {
        "events": consumer.num_events, "messages": last + 1, "lost": consumer.num_lost,
        "replayed": consumer.num_replayed, "pages": sum(map(len, consumer.pages.values())),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(arguments.events, arguments.seed, folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
