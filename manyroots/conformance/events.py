"""The check of KV events: pages of two parties must differ in what a router is told of them.

In: an address at which the server publishes events as vLLM does, over ZMQ. Out: rows. A router
that builds its index by hashes needs other hashes; one that builds it by tokens needs the adapter
or the extra keys beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from manyroots.conformance.client import Party
from manyroots.conformance.pairs import Bench, names, row
from manyroots.conformance.report import CheckRow, Finding, Verdict, not_judged

_QUIET_S = 0.2
"""Events of a step come within this time."""
_PATIENCE_S = 10.0
_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys",
)  # fmt: skip
"""Of `BlockStored`, in the order in which servers that send arrays have them."""


@dataclass(frozen=True, slots=True)
class StoredPages:
    """What one party's request had published."""

    hashes: frozenset[Any]
    owners: frozenset[str]
    """Adapter and extra keys, as text."""


class KvEvents:
    """A subscription."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        if "*" in endpoint:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def stored(self, wait_s: float) -> list[dict[str, Any]]:
        """What is published until nothing comes for a while; waits so long for the first."""
        found: list[dict[str, Any]] = []
        while self._socket.poll(int(1e3 * (_QUIET_S if found else wait_s))):
            payload = self._socket.recv_multipart()[-1]
            found += _stored(msgspec.msgpack.decode(payload))
        return found


def publishing(bench: Bench, endpoint: str, pairs: Sequence[tuple[Party, Party]]) -> list[CheckRow]:
    events = KvEvents(endpoint)
    try:
        if not _is_heard(bench, events, pairs[0][0]):
            why = f"nothing is published at {endpoint}"
            return [CheckRow("KV events", "all", (not_judged(why, "events"),))]
        return [
            row("KV events", names(*pair), partial(_published, bench, events, *pair))
            for pair in pairs
        ]
    finally:
        events.close()


def _is_heard(bench: Bench, events: KvEvents, party: Party) -> bool:
    """Subscriptions take a moment, in which events are lost."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        bench.client.ask(party, bench.prompts.draw(), max_tokens=1)
        if events.stored(_QUIET_S):
            return True
    return False


def _published(bench: Bench, events: KvEvents, writer: Party, reader: Party) -> list[Finding]:
    prompt = bench.prompts.draw()
    told = []
    for party in (writer, reader):
        events.stored(0)  # of what came before
        bench.client.ask(party, prompt, max_tokens=1)
        told.append(_pages(events.stored(_PATIENCE_S / 5)))
    wrote, read = told
    if not wrote.hashes or not read.hashes:
        return [not_judged("one of the two had nothing published", "events")]
    if wrote.hashes & read.hashes:
        count = len(wrote.hashes & read.hashes)
        return [Finding("events", Verdict.LEAK, f"{count} pages of both have the same hash")]
    # A salt may be told of the first page alone, since later ones follow from it.
    if wrote.owners == read.owners:
        return [Finding("events", Verdict.LEAK, "adapter and extra keys of both are the same")]
    return [Finding("events", Verdict.APART, "hashes and owners differ")]


def _pages(events: list[dict[str, Any]]) -> StoredPages:
    return StoredPages(
        frozenset(page for event in events for page in event.get("block_hashes") or ()),
        frozenset(
            str((event.get("lora_id"), event.get("lora_name"), keys))
            for event in events
            for keys in set(map(str, event.get("extra_keys") or [None]))
        ),
    )


def _stored(batch: Any) -> Iterator[dict[str, Any]]:
    """The `BlockStored` events of a batch, whether they are maps or arrays."""
    for event in batch[1]:
        if isinstance(event, dict) and event.get("type") == "BlockStored":
            yield event
        elif isinstance(event, list) and event and event[0] == "BlockStored":
            yield dict(zip(_FIELDS, event[1:], strict=False))
