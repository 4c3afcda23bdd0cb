"""Random life of adapters against a machine that keeps the bytes, audited after every call.

The machine is a naive execute half: it carries out intents in order, answers loads late and in any
order, and knows which weights each slot really holds. A slot overwritten under a launched step, a
load from where nothing is, or a request computed with other weights than its own shows there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from manyroots.errors import NotFoundError
from manyroots.ids import AdapterDigest, AdapterName, AdapterSlot, StepId, Tier
from manyroots.lora.audit import audit
from manyroots.lora.limits import AdapterLimits
from manyroots.lora.outcomes import Readiness
from manyroots.lora.registry import Hold
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.step import AdapterIntent, AdapterLoaded, DropAdapter, LoadAdapter
from tests.helpers.seeded import seeds


@dataclass
class Machine:
    """Slots and host memory as they really are."""

    max_host: int | None
    num_slots: int | None
    slots: dict[AdapterSlot, tuple[int, AdapterDigest | None]] = field(default_factory=dict)
    """Generation and content; None where there is nothing whole."""
    host: set[AdapterDigest] = field(default_factory=set)
    loads: list[LoadAdapter] = field(default_factory=list)
    kept: set[AdapterDigest] = field(default_factory=set)
    """Of `host`: read to open an adapter, and not loaded from there yet."""
    steps: dict[StepId, dict[AdapterSlot, AdapterDigest]] = field(default_factory=dict)

    def carry_out(self, intents: tuple[AdapterIntent, ...]) -> None:
        for intent in intents:
            if isinstance(intent, DropAdapter):
                self._drop(intent)
            else:
                self._load(intent)

    def _drop(self, drop: DropAdapter) -> None:
        if drop.tier is Tier.HOST:
            self.host.discard(drop.digest)
            return
        assert drop.tier is Tier.DEVICE
        assert drop.target is not None
        assert drop.target.slot not in self.used(), "a launched step uses the slot"
        if self.slots[drop.target.slot] == (drop.target.generation, drop.digest):
            self.slots[drop.target.slot] = (drop.target.generation, None)

    def _load(self, load: LoadAdapter) -> None:
        assert load.digest not in [other.digest for other in self.loads], "two loads at once"
        was_kept = load.digest in self.kept
        assert (load.digest in self.host) == (load.source is Tier.HOST) or was_kept
        self.kept.discard(load.digest)
        self.host.add(load.digest)
        assert self.max_host is None or len(self.host) <= self.max_host, "host memory is full"
        if load.target is not None:
            slot, generation = load.target.slot, load.target.generation
            assert slot not in self.used(), "a launched step uses the slot"
            assert self.num_slots is None or slot < self.num_slots
            assert generation > self.slots.get(slot, (0, None))[0]
            assert slot not in [other.target.slot for other in self.loads if other.target]
            self.slots[slot] = (generation, None)
        self.loads.append(load)

    def keep(self, digest: AdapterDigest) -> None:
        """What was read to open an adapter; a load that was decided before need not read it."""
        self.kept.add(digest)
        self.host.add(digest)

    def answer(self, rng: random.Random) -> AdapterLoaded:
        load = self.loads.pop(rng.randrange(len(self.loads)))
        if rng.random() < 0.1:
            return AdapterLoaded(load.load_id, "planted")
        if load.target is not None:
            self.slots[load.target.slot] = (load.target.generation, load.digest)
        return AdapterLoaded(load.load_id, None)

    def used(self) -> set[AdapterSlot]:
        return {slot for slots in self.steps.values() for slot in slots}


class Traffic:
    """Two residencies fed the same calls, one machine, and what a user would expect."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        max_loras, spare = rng.choice([0, 1, 2, 3]), rng.choice([0, 0, 1])
        max_cpu = rng.choice([0, max_loras + spare, max_loras + spare + rng.randint(0, 3)])
        limits = AdapterLimits(max_loras=max_loras, max_cpu_loras=max_cpu, num_spare_slots=spare)
        self.cap = max_loras
        self.one, self.two = Residency(limits), Residency(limits)
        self.machine = Machine(limits.num_host_copies, limits.num_slots)
        self.names = [AdapterName(name) for name in "abcdef"[: rng.randint(3, 6)]]
        self.contents = [AdapterDigest(bytes([n])) for n in range(rng.randint(3, 8))]
        self.expected: dict[AdapterName, AdapterDigest] = {}
        self.requests: list[tuple[Hold, Hold, AdapterDigest]] = []
        self.depth = rng.choice([0, 1])
        self.next_step = 1

    def needed(self) -> set[AdapterDigest]:
        return set(self.expected.values()) | {digest for _, _, digest in self.requests}

    def register(self) -> None:
        name, digest = self.rng.choice(self.names), self.rng.choice(self.contents)
        before = self.needed()
        self.expected[name] = digest
        spec = AdapterSpec(digest, rank=8, num_bytes=1)
        one, two = (r.register(name, spec, path=name) for r in (self.one, self.two))
        assert one == two
        assert set(one.freed) == before - self.needed()
        if self.rng.random() < 0.5:  # opened from storage, as the directory does it
            is_kept = self.one.take_copy(digest)
            assert is_kept == self.two.take_copy(digest)
            self.hand_over()  # what makes room for it goes first, so that the limit can be checked
            if is_kept and digest in self.one.host:
                self.machine.keep(digest)

    def unload(self) -> None:
        name = self.rng.choice(self.names)
        before = self.needed()
        if self.expected.pop(name, None) is None:
            for residency in (self.one, self.two):
                with pytest.raises(NotFoundError):
                    residency.unload(name)
            return
        one, two = self.one.unload(name), self.two.unload(name)
        assert one == two
        assert set(one.freed) == before - self.needed()

    def submit(self) -> None:
        name = self.rng.choice(self.names)
        if name not in self.expected:
            with pytest.raises(NotFoundError):
                self.one.acquire(name)
            return
        holds = self.one.acquire(name), self.two.acquire(name)
        assert holds[0].digest == self.expected[name]
        self.requests.append((*holds, self.expected[name]))

    def end(self) -> None:
        """Most requests end after they ran, some before."""
        if self.requests:
            index = self.rng.randrange(len(self.requests))
            if self.requests[index][0].slot is not None or self.rng.random() < 0.1:
                self.finish(index)

    def finish(self, index: int) -> None:
        before = self.needed()
        one, two, _ = self.requests.pop(index)
        for residency, hold in ((self.one, one), (self.two, two)):
            if hold.slot is not None:
                residency.unseat(hold)
        freed = self.one.release(one)
        assert freed == self.two.release(two)
        assert set(freed) == before - self.needed()

    def retract(self) -> None:
        seated = [request for request in self.requests if request[0].slot is not None]
        if seated:
            one, two, _ = self.rng.choice(seated)
            self.one.unseat(one)
            self.two.unseat(two)

    def step(self) -> None:
        """As the scheduler does it: seat the requests that are ready, load for the others,
        launch."""
        wanted: dict[AdapterDigest, None] = {}
        for one, two, digest in self.requests:
            if one.slot is not None or self.rng.random() < 0.2:
                continue
            readiness = self.one.readiness(digest)
            if readiness is Readiness.READY and self.rng.random() < 0.8:
                assert self.one.seat(one) == self.two.seat(two)
            elif readiness is not Readiness.CAPPED:
                wanted[digest] = None
        first = list(wanted)[: self.cap or None]
        seated = {digest for one, _, digest in self.requests if one.slot is not None}
        assert not self.cap or len(seated) <= self.cap
        there = set(self.one.slots.by_owner)
        prepared = self.one.prepare(first)
        assert prepared == self.two.prepare(first)
        assert not (there - set(self.one.slots.by_owner)) & {*first, *seated}, "its own step's"
        self.hand_over()
        self.launch()

    def launch(self) -> None:
        step_id = StepId(self.next_step)
        self.next_step += 1
        uses = {}
        for one, _, digest in self.requests:
            if one.slot is not None:
                assert self.machine.slots[one.slot][1] == digest, "computed with other weights"
                uses[one.slot] = digest
        self.machine.steps[step_id] = uses
        self.one.step_launched(step_id)
        self.two.step_launched(step_id)
        while len(self.machine.steps) > self.depth:
            self.done()

    def done(self) -> None:
        if self.machine.steps:
            step_id, uses = next(iter(self.machine.steps.items()))
            for slot, digest in uses.items():
                assert self.machine.slots[slot][1] == digest, "overwritten under a launched step"
            del self.machine.steps[step_id]
            self.one.step_done(step_id)
            self.two.step_done(step_id)

    def answer(self) -> None:
        if not self.machine.loads:
            return
        answer = self.machine.answer(self.rng)
        outcome = self.one.acknowledge(answer)
        assert outcome == self.two.acknowledge(answer)
        if outcome.error is not None:
            for index in reversed(range(len(self.requests))):
                one, _, digest = self.requests[index]
                if digest == outcome.digest:
                    assert one.slot is None, "a running request lost its weights"
                    self.finish(index)

    def hand_over(self) -> None:
        intents = self.one.flush()
        assert intents == self.two.flush()
        self.machine.carry_out(intents)

    def settle(self) -> None:
        """All requests run in the end, and nothing is left over."""
        rounds = 0
        while self.requests:
            rounds += 1
            assert rounds < 2000, "requests wait for ever"
            self.step()
            audit(self.one)
            for index in reversed(range(len(self.requests))):
                if self.requests[index][0].slot is not None:
                    self.finish(index)
            self.answer()
        for name in list(self.expected):
            del self.expected[name]
            self.one.unload(name)
            self.two.unload(name)
        while self.machine.steps:
            self.done()
        while self.machine.loads:
            self.answer()
        self.hand_over()
        audit(self.one)
        assert not self.machine.host
        assert all(content is None for _, content in self.machine.slots.values())
        stats = self.one.stats()
        assert (stats.num_on_device, stats.num_on_host, stats.num_loading) == (0, 0, 0)
        assert (stats.num_loaded, stats.num_draining, stats.num_running) == (0, 0, 0)


OPERATIONS = [
    *["unload", "done"],
    *2 * ["register", "retract"],
    *7 * ["submit", "end"],
    *9 * ["step", "answer"],
]


@pytest.mark.parametrize("seed", seeds(100))
def test_random_adapter_traffic_computes_each_request_with_its_own_weights(seed: int) -> None:
    """W01, W03, W04, W05, W06, W07, W08, W10, W11, L01: whatever is loaded, unloaded, reloaded,
    retracted and failed, and N17: two residencies fed the same calls say the same."""
    traffic = Traffic(seed)
    for _ in range(10):
        traffic.register()
    for _ in range(250):
        getattr(traffic, traffic.rng.choice(OPERATIONS))()
        if traffic.rng.random() < 0.7:
            traffic.hand_over()
        audit(traffic.one)
    traffic.settle()
