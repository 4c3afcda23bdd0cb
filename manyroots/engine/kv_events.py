"""Publishes to routers which pages this engine has, and on which tier: over ZMQ, in vLLM's format.

Takes the cache's recorded events, step by step; publishes one message for each: topic, an 8-byte
big-endian number, and a msgpack batch `[time, events, data_parallel_rank]`. A subscriber that
missed some sends the first missing number to the replay address. It gets the events that are still
kept, then an end mark. The first message clears all pages, so that a subscriber that outlives an
engine starts from an empty state.

Encoding and sending run on a separate thread. Imported only if events are enabled.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from manyroots.cache.events import CacheEvent, PagesStored
from manyroots.cache.keys import short_hash
from manyroots.errors import ConfigError
from manyroots.ids import AdapterDigest, AdapterName, Tier
from manyroots.kv_configs import EventsChoice

logger = logging.getLogger(__name__)

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
END = (-1).to_bytes(8, "big", signed=True)
_RANK = 0
_POLL_S = 0.05
"""How long a replay request may wait while nothing is published."""
_CLOSE_S = 1.0

NameOf = Callable[[AdapterDigest], AdapterName | None]


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Pages that can be found now. Field names are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    """Always null: adapters have names."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """For each page, what its hash depends on besides tokens: the adapter's digest in hexadecimal,
    the salt, and the adapter's start in the page if it is not the first token."""
    cache_salt: str | None = None
    """The salt alone, as Dynamo's indexer reads it; without it, the indexer would treat salted
    pages as shared."""


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Pages that can no longer be found."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """No page can be found any more, on any tier."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def to_wire(event: CacheEvent, page_size: int, name_of: NameOf) -> BlockStored | BlockRemoved:
    """A cache event in the published form."""
    hashes = [short_hash(page) for page in event.hashes]
    if not isinstance(event, PagesStored):
        return BlockRemoved(hashes, MEDIA[event.tier])
    adapter, salt = event.namespace
    extra: list[Any] = [] if adapter is None else [adapter.hex()]
    if salt is not None:
        extra.append(salt)
    if event.begin:
        extra.append(event.begin)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if event.parent is None else short_hash(event.parent),
        token_ids=np.frombuffer(event.tokens, np.int32).tolist(),
        block_size=page_size,
        lora_id=None,
        medium=MEDIA[event.tier],
        lora_name=None if adapter is None else name_of(adapter),
        extra_keys=[tuple(extra)] * len(hashes) if extra else None,
        cache_salt=salt,
    )


class EventPublisher:
    """The sockets, and the thread that serves them."""

    def __init__(self, choice: EventsChoice, page_size: int, name_of: NameOf) -> None:
        self._page_size = page_size
        self._name_of = name_of
        self._topic = choice.topic.encode()
        self._queue: queue.Queue[tuple[int, list[Any]] | None] = queue.Queue(choice.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=choice.buffer_steps)
        self._next = 1
        self._has_dropped = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._socket.set_hwm(choice.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            _attach(self._socket, choice.endpoint)
            if choice.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(choice.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-config: {choice.endpoint} or {choice.replay_endpoint} can't be "
                f"opened: {error}. Give addresses that are free."
            ) from error
        self._queue.put((0, [AllBlocksCleared()]))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish the changes of a step; returns at once."""
        if not events:
            return
        # Resolve names now: an adapter may be unloaded before they are sent.
        wired = [to_wire(event, self._page_size, self._name_of) for event in events]
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, wired))
        except queue.Full:  # subscribers see that they have missed something
            if not self._has_dropped:
                logger.warning("KV events come faster than they are sent: some are dropped")
            self._has_dropped = True

    def close(self) -> None:
        """Send what is queued, if that takes at most a second."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            logger.debug("KV events that were never sent are dropped")
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            try:
                job = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                self._answer()
                continue
            if job is None:
                self._context.destroy(linger=int(_CLOSE_S * 1000))
                return
            number, events = job
            payload = encoder.encode(EventBatch(time.time(), events, _RANK))
            self._kept.append((number, payload))
            self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._answer()

    def _answer(self) -> None:
        """Answer requests for missed events."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a request for KV events was not understood: %d frames", len(frames))
                continue
            client, _, first = frames
            for number, payload in self._kept:
                if number >= int.from_bytes(first, "big"):
                    told = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    self._replay.send_multipart(told)
            self._replay.send_multipart((client, b"", b"", END, b""))


def _attach(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind wildcard addresses, connect to specific ones, as vLLM does."""
    is_own = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    if is_own:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
