"""Answers the live page's questions with the engine's current state, as plain data.

In: questions, between two steps. Out: one `Snapshot` each, without a prompt, a token or a salt.
Reading a large tree is spread over several steps, so that no step waits for an open page. Costs
nothing while there is no question.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from manyroots.cache.cache import PrefixCache
from manyroots.cache.inspection import TreeWalk
from manyroots.engine.loop import EngineLoop
from manyroots.ids import AdapterDigest, Namespace, Tier
from manyroots.lora.registry import AdapterVersion
from manyroots.lora.residency import Residency
from manyroots.messages import Submit
from manyroots.observe.steps import StepRing
from manyroots.scheduler.scheduler import Scheduler
from manyroots.snapshot import (
    MAX_REQUESTS,
    AdapterView,
    MemoryPart,
    NamespaceView,
    RequestView,
    Snapshot,
    SnapshotAsk,
    TreeView,
    WaitReason,
)

SLICE_NODES = 500
"""Nodes of the tree that are read between two steps: about a millisecond."""
MOST_EVICTED = 1000
"""Most nodes whose position in the eviction order is included."""
MAX_NUMBERED = 100_000
"""Most namespaces and tenants with their own number; then numbering restarts."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that an engine took at start, in bytes of all ranks together."""

    weights_bytes: int
    slot_bytes: int
    """Bytes of one adapter's slot on the device, at its largest."""
    unit_bytes: Sequence[int]
    """Bytes of one page or state, by family of layers."""
    block_bytes: int = 0
    """Bytes of a block of adapters' memory, if blocks are counted (--max-loras auto)."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts that snapshots read."""

    scheduler: Scheduler
    cache: PrefixCache
    adapters: Residency
    memory: EngineMemory
    max_num_seqs: int
    max_num_batched_tokens: int


class Snapshots:
    """Takes questions, and answers them one after the other."""

    def __init__(self, parts: EngineParts, loop: EngineLoop, ring: StepRing) -> None:
        self._parts = parts
        self._loop = loop
        self._ring = ring
        self._asked: deque[SnapshotAsk] = deque()
        self._walk: TreeWalk | None = None
        self._tenants: dict[str, int] = {}
        self._namespaces: dict[Namespace, int] = {}
        self._cpu_s = 0.0
        self.encode_cpu_s = 0.0
        """CPU time to encode the last answer; reported with the next."""

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def ask(self, ask: SnapshotAsk) -> None:
        self._asked.append(ask)

    def answer(self) -> Snapshot | None:
        """The answer to the oldest question; None if more of the tree must be read first."""
        begin_s = time.thread_time()
        ask = self._asked[0]
        if ask.wants_tree:
            if self._walk is None:
                self._walk = self._parts.cache.walk_tree(self._namespace)
            if self._walk.advance(SLICE_NODES):
                self._cpu_s += time.thread_time() - begin_s
                return None
        self._asked.popleft()
        walk, self._walk = self._walk, None
        return self._snapshot(ask, walk, begin_s)

    def _snapshot(self, ask: SnapshotAsk, walk: TreeWalk | None, begin_s: float) -> Snapshot:
        parts, ring = self._parts, self._ring
        is_paused = self._loop.is_paused
        early = list(self._early())
        queued = parts.scheduler.inspect(
            self._tenant, most=MAX_REQUESTS - len(early), is_paused=is_paused
        )
        steps = ring.since(ask.since_step)
        explained = None if ask.explain_step is None else ring.explain(ask.explain_step)
        numbers = {number for step in steps for number, _ in step.rows_by_adapter}
        if explained is not None:
            numbers |= {number for number, _ in explained.loads}
            numbers |= {row.adapter for row in explained.rows}
        tree = None if walk is None else self._tree(walk)
        requests = early + queued
        adapters = self._adapters(early)
        memory = self._memory()
        names = {number: self._name(ring.digests[number]) for number in numbers if number >= 0}
        cpu_s = self._cpu_s + time.thread_time() - begin_s + self.encode_cpu_s
        self._cpu_s = self.encode_cpu_s = 0.0
        return Snapshot(
            ask.op_id,
            self._loop.stats(),
            cpu_s,
            is_paused,
            len(early) + parts.scheduler.num_requests,
            requests,
            adapters,
            names,
            memory,
            steps,
            self._settings(),
            tree,
            explained,
        )

    # Requests

    def _early(self) -> Iterator[RequestView]:
        """Requests that the scheduler does not know yet."""
        for waiting in islice(self._loop.preparation.waiting.values(), MAX_REQUESTS):
            if waiting.needs_adapter:
                reason = "its adapter's files are being read"
                yield self._before(waiting.submit, WaitReason.LOAD, reason)
            else:
                reason = "its grammar is being compiled"
                yield self._before(waiting.submit, WaitReason.GRAMMAR, reason)

    def _before(self, submit: Submit, wait: WaitReason, reason: str) -> RequestView:
        return RequestView(
            submit.request_id, submit.adapter, self._tenant(submit.salt), "preparing",
            wait.value, reason, submit.priority, len(submit.prompt), 0, 0,
            submit.max_tokens or submit.sampling.max_tokens or 0, 0, 0, 0, "", 0, 0,
        )  # fmt: skip

    def _tenant(self, salt: str | None) -> int:
        """The number of a salt; the salt itself is never reported."""
        if salt is None:
            return 0
        number = self._tenants.get(salt)
        if number is None:
            if len(self._tenants) >= MAX_NUMBERED:
                self._tenants.clear()
            number = self._tenants[salt] = len(self._tenants) + 1
        return number

    # Adapters

    def _adapters(self, early: list[RequestView]) -> list[AdapterView]:
        registry = self._parts.adapters.registry
        counts = self._parts.scheduler.count_by_adapter()
        reading = Counter(view.adapter for view in early)
        versions = [*registry.loaded.values(), *registry.draining.values()]
        return [
            self._adapter(version, counts.get(version.digest, Counter()), reading[version.name])
            for version in versions
        ]

    def _adapter(
        self, version: AdapterVersion, counts: Counter[str], num_reading: int
    ) -> AdapterView:
        digest, adapters = version.digest, self._parts.adapters
        slot = adapters.slots.find(digest)
        tier = Tier.HOST if digest in adapters.host else Tier.STORAGE
        if slot is not None and not slot.is_loading:
            tier = Tier.DEVICE
        num_running = counts["running"] + counts["draining"]
        num_paused = counts["paused"]
        num_waiting = sum(counts.values()) - num_running - num_paused + num_reading
        state = "idle"
        if slot is not None and slot.is_loading:
            state = "loading"
        elif num_running:
            state = "running"
        elif num_paused:
            state = "paused"
        elif num_waiting:
            state = "waiting"
        number = self._ring.number_of(digest)
        return AdapterView(
            version.name,
            digest.hex()[:12],
            tier.value,
            state,
            version.is_pinned,
            adapters.registry.loaded.get(version.name) is not version,
            version.spec.rank,
            version.spec.num_bytes,
            num_running,
            num_waiting + num_paused,
            self._ring.loads.get(number, 0),
            self._parts.scheduler.num_pauses(digest),
            adapters.left.get(digest, ""),
            tuple(self._loop.ways.get(digest.hex(), {}).items()),
        )

    def _name(self, digest: AdapterDigest) -> str:
        return self._parts.adapters.registry.name_of(digest) or f"unloaded {digest.hex()[:8]}"

    # Memory

    def _memory(self) -> list[MemoryPart]:
        """The use of each tier's memory; for one tier, everything that the engine took there."""
        parts, memory = self._parts, self._parts.memory
        found = [MemoryPart("device", "weights", "", "used", memory.weights_bytes, 1)]
        found += self._adapter_memory()
        for index, plane in enumerate(parts.cache.plane_views()):
            size = memory.unit_bytes[index % len(memory.unit_bytes)]
            kind = "states" if plane.kind == "state" else "pages"
            uses = {
                "held": plane.num_held,
                "cached": plane.num_cached,
                "free": plane.num_free,
            }
            found += [
                MemoryPart(plane.tier, kind, plane.family, use, count * size, count)
                for use, count in uses.items()
            ]
        return found

    def _adapter_memory(self) -> list[MemoryPart]:
        adapters, size = self._parts.adapters, self._parts.memory.slot_bytes
        on_device = len(adapters.slots.by_owner)
        on_host = sum(
            content.spec.num_bytes
            for content in {v.digest: v for v in adapters.registry.loaded.values()}.values()
            if content.digest in adapters.host
        )
        num_slots = adapters.slots.num_slots or on_device
        num_free = num_slots - on_device
        used, free = on_device * size, num_free * size
        if (blocks := adapters.limits.blocks) is not None:
            num_free = adapters.slots.num_free_blocks
            size = self._parts.memory.block_bytes
            used, free = (blocks.num_blocks - num_free) * size, num_free * size
        return [
            MemoryPart("device", "adapters", "", "used", used, on_device),
            MemoryPart("device", "adapters", "", "free", free, num_free),
            MemoryPart("host", "adapters", "", "used", on_host, len(adapters.host)),
        ]  # fmt: skip

    def _settings(self) -> dict[str, int]:
        parts = self._parts
        host = [plane for plane in parts.cache.plane_views() if plane.tier == Tier.HOST.value]
        return {
            "block_size": parts.cache.page_size,
            "num_pages": parts.cache.index.pools[0].num_units,
            "num_host_pages": host[0].num_units if host else 0,
            "max_num_seqs": parts.max_num_seqs,
            "max_num_batched_tokens": parts.max_num_batched_tokens,
            "max_loras": parts.adapters.limits.max_loras,
            "max_cpu_loras": parts.adapters.limits.max_cpu_loras,
            "page_bytes": sum(parts.memory.unit_bytes),
            "slot_bytes": parts.memory.slot_bytes,
        }

    # The tree

    def _tree(self, walk: TreeWalk) -> TreeView:
        cache, registry = self._parts.cache, self._parts.adapters.registry
        shown = {node.namespace for node in walk.nodes}
        namespaces = []
        for namespace, number in self._namespaces.items():
            if number in shown:
                digest = namespace.adapter
                name = None if digest is None else registry.name_of(digest) or digest.hex()[:8]
                namespaces.append(NamespaceView(number, name, self._tenant(namespace.salt)))
        return TreeView(
            cache.page_size,
            cache.num_uses,
            cache.plane_views(),
            namespaces,
            walk.nodes,
            cache.next_evicted(MOST_EVICTED),
        )

    def _namespace(self, namespace: Namespace) -> int:
        number = self._namespaces.get(namespace)
        if number is None:
            if len(self._namespaces) >= MAX_NUMBERED:
                self._namespaces.clear()
            number = self._namespaces[namespace] = len(self._namespaces) + 1
        return number
