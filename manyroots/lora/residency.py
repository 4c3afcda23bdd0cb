"""Where each adapter's weights are, and where they go next: what the scheduler knows of adapters.

In: adapters loaded and unloaded, requests that begin, run and end, steps launched and done, loads
answered. Out: slots for running requests, and intents for the execute half, each exactly once and
in the order in which they must be carried out.

A request *holds* a version from its submission to its end, so that unloading never takes weights
from under it; it has a *seat* while it runs, so that its slot stays. Distinct seated adapters are
what the cap counts. Loads are asynchronous: an adapter that is not on the device keeps only its
own requests waiting. One that is wanted while no slot can be had comes as far as host memory
meanwhile, one at a time, so that its load into a slot will be short.

No clock, thread or tensor; two instances fed the same calls give the same intents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from manyroots.errors import RequestError
from manyroots.ids import AdapterDigest, AdapterName, AdapterSlot, StepId, Tier
from manyroots.lora.host import HostCopies
from manyroots.lora.limits import AdapterLimits, num_spare
from manyroots.lora.outcomes import LoadOutcome, Prepared, Readiness
from manyroots.lora.registry import Hold, Registered, Registry, Unloaded
from manyroots.lora.slots import DeviceSlots, Slot
from manyroots.lora.spec import AdapterSpec
from manyroots.lora.transfers import AdapterTransfers
from manyroots.messages import AdapterStats
from manyroots.step import AdapterIntent, AdapterLoaded, SlotRef


class Lender(Protocol):
    """Something else that uses the memory of the device's blocks, and can do with less."""

    @property
    def num_lendable_blocks(self) -> int:
        """Blocks that `lend` could give now."""

    def lend(self, num_blocks: int) -> None:
        """Give the slots so many blocks more, or as many as there are."""

    def is_cheaper(self, idle: Slot) -> bool:
        """Whether what the lender would give up next is worth less than an idle adapter."""


class Residency:
    """Registry, device slots and host copies, changed together."""

    def __init__(self, limits: AdapterLimits) -> None:
        self.limits = limits
        self.registry = Registry()
        blocks = limits.blocks
        self.slots = DeviceSlots(limits.num_slots, 0 if blocks is None else blocks.num_blocks)
        # The files of an adapter that was unloaded may be replaced at any time: a copy that old
        # requests still need is the last to go.
        self.host = HostCopies(limits.num_host_copies, self.registry.is_draining)
        self.transfers = AdapterTransfers()
        self.total_device_evictions = 0
        self._total_host_evictions = 0
        self._total_device_unloads = 0
        self._total_host_unloads = 0
        self.lender: Lender | None = None
        """Set once, where adapters share memory with pages."""
        self.most_blocks = 0
        """Of the largest adapter so far."""
        self.left: dict[AdapterDigest, str] = {}
        """Why contents that are still needed last left a tier; for people alone."""

    # Adapters

    def register(
        self, name: AdapterName, spec: AdapterSpec, *, path: str, is_pinned: bool = False
    ) -> Registered:
        """Take requests for `name`. Whatever it meant before drains.

        A pinned adapter is brought to the device as soon as a slot can be had, and stays there.
        """
        self._check_size(name, spec)
        if is_pinned:
            self._check_pin(name, spec)
        self.most_blocks = max(self.most_blocks, self.limits.num_blocks(spec))
        registered = self.registry.register(name, spec, path=path, is_pinned=is_pinned)
        self._free(registered.freed)
        if is_pinned:
            self.prepare([spec.digest])
        return registered

    def take_copy(self, digest: AdapterDigest) -> bool:
        """Whether a copy in host memory that was just read, to open the adapter, is kept there.

        It takes the place of the copy that was unused for longest, and if all are bound, of
        the adapter whose slot has been idle for longest: an adapter that is opened is wanted next.
        """
        if any(load.digest == digest for load in self.transfers.loads.values()):
            return True  # what was decided to be read, as of a pinned adapter, need not be
        if digest not in self.registry.contents or digest in self.host:
            return False
        self._evict_from_host(1)
        if not self.host.has_room():
            self._drop_unused(self._make_room_on_device([0], keep=()))
            self._evict_from_host(1)
        if not self.host.has_room():
            return False
        self.host.loosen(digest)
        self.transfers.keep_on_host(digest)
        return True

    def unload(self, name: AdapterName) -> Unloaded:
        """Take no new requests for `name`; its weights go when the last request is over."""
        unloaded = self.registry.unload(name)
        self._free(unloaded.freed)
        return unloaded

    # Requests

    def acquire(self, asked: AdapterName) -> Hold:
        """A submitted request's hold on what a name means now, or on the revision after its `@`."""
        return self.registry.acquire(asked)

    def release(self, hold: Hold) -> tuple[AdapterDigest, ...]:
        """The request is over. Gives the contents whose pages the cache should evict."""
        if hold.slot is not None:
            raise RuntimeError(f"a request of adapter {hold.version.name!r} ended in its seat")
        freed = self.registry.release(hold)
        self._free(freed)
        return freed

    def whereabouts(self, name: AdapterName) -> Tier:
        """The fastest tier that has, or is being loaded from, what `name` means now."""
        digest = self.registry.loaded[name].digest
        slot = self.slots.find(digest)
        if slot is None:
            return Tier.HOST if digest in self.host else Tier.STORAGE
        if not slot.is_loading:
            return Tier.DEVICE
        loads = self.transfers.loads.values()
        return next(load.source for load in loads if load.digest == digest)

    def readiness(self, digest: AdapterDigest) -> Readiness:
        """Whether a request of this adapter could be seated now; reading it changes nothing."""
        slot = self.slots.find(digest)
        if slot is not None and slot.num_seats > 0:
            return Readiness.READY
        if self.limits.max_loras and self.slots.num_seated >= self.limits.max_loras:
            return Readiness.CAPPED
        if slot is None:
            return Readiness.ABSENT
        return Readiness.LOADING if slot.is_loading else Readiness.READY

    def num_seats(self, digest: AdapterDigest) -> int:
        """How many of an adapter's requests run, or are over and drain."""
        slot = self.slots.find(digest)
        return 0 if slot is None else slot.num_seats

    def seated(self) -> list[tuple[AdapterDigest, int]]:
        """Adapters that run, each with its number of seats, by slot."""
        slots = [slot for slot in self.slots.by_owner.values() if slot.num_seats > 0]
        slots.sort(key=lambda slot: slot.number)
        return [(slot.owner, slot.num_seats) for slot in slots if slot.owner is not None]

    def num_blocks(self, digest: AdapterDigest) -> int:
        """What an adapter takes of the device's blocks; 0 where slots alone are counted."""
        if self.limits.blocks is None:
            return 0
        version = next(iter(self.registry.contents[digest].versions.values()))
        return self.limits.num_blocks(version.spec)

    def fits(
        self,
        adapters: Collection[AdapterDigest],
        num_blocks: int,
        *,
        leaves_spare: bool = False,
    ) -> bool:
        """Whether these adapters, which take so many blocks, can run at once, with pinned ones on
        the device beside them. `leaves_spare`: and several of them leave room to load the next."""
        cap, num_slots = self.limits.max_loras, self.slots.num_slots
        if cap and len(adapters) > cap:
            return False
        if num_slots is None:
            return True
        beside = [digest for digest in self.registry.pinned if digest not in adapters]
        if len(adapters) + len(beside) > num_slots:
            return False
        blocks = self.limits.blocks
        if blocks is None:
            return True
        num_total = self._num_blocks_in_reach
        num_left = num_total - sum(map(self.num_blocks, beside))
        if leaves_spare and len(adapters) > 1:
            num_left -= num_spare(num_total)
        return num_blocks <= num_left

    @property
    def _num_blocks_in_reach(self) -> int:
        """Those of adapters, and those that pages could give them now."""
        lender = self.lender
        return self.slots.num_blocks + (0 if lender is None else lender.num_lendable_blocks)

    def is_resident(self, digest: AdapterDigest) -> bool:
        """Whether an adapter's weights are on the device."""
        slot = self.slots.find(digest)
        return slot is not None and not slot.is_loading

    @property
    def loads_ahead(self) -> bool:
        """Whether there are slots beyond those of as many adapters as may run at once: the next
        one's weights come while others run."""
        num_slots = self.slots.num_slots
        if num_slots is None:
            return True
        if self.limits.blocks is not None:
            return num_spare(self._num_blocks_in_reach) > 0
        num_idle_pins = sum(not self.num_seats(digest) for digest in self.registry.pinned)
        return num_slots - num_idle_pins > (self.limits.max_loras or num_slots)

    def comes_ahead(self, digest: AdapterDigest) -> bool:
        """Whether an adapter's weights can come before another makes room for it."""
        if self.limits.blocks is None or self.slots.find(digest) is not None:
            return self.loads_ahead
        num_obtainable = self.num_obtainable
        assert num_obtainable is not None
        return self.num_blocks(digest) <= num_obtainable

    def load_steps(self, digest: AdapterDigest) -> int:
        """For how many steps an adapter could not be used while it came to the device from where
        it is, as far as the last loads tell."""
        source = Tier.HOST if digest in self.host else Tier.STORAGE
        return self.transfers.load_steps[source].expected

    @property
    def host_load_steps(self) -> int:
        """The same of one that is in host memory."""
        return self.transfers.load_steps[Tier.HOST].expected

    @property
    def longest_load_steps(self) -> int:
        """The most steps that one of the last loads took, or that one takes so far, wherever
        from."""
        of_last = (steps.longest for steps in self.transfers.load_steps.values())
        return max(*of_last, self.transfers.oldest_load_steps)

    @property
    def num_obtainable(self) -> int | None:
        """Slots, or blocks where those are counted, that `prepare` can give to others sooner or
        later: not used by a running request, nor pinned. None for no limit."""
        slots, blocks = self.slots, self.limits.blocks
        if slots.num_slots is None:
            return None
        owners = [slots.by_owner[d] for d in self.registry.pinned if d in slots.by_owner]
        pinned = [slot for slot in owners if slot.num_seats == 0]
        if blocks is None:
            return slots.num_slots - slots.num_seated - len(pinned)
        num_pinned = sum(slot.num_blocks for slot in pinned)
        return self._num_blocks_in_reach - slots.num_seated_blocks - num_pinned

    def num_obtaining(self, unseated: Sequence[AdapterDigest]) -> int:
        """How many of the first of these, of which none runs, can be on the device at once."""
        most = self.num_obtainable
        if most is None or self.limits.blocks is None:
            return len(unseated) if most is None else min(most, len(unseated))
        for count, digest in enumerate(unseated):
            if digest not in self.registry.pinned:
                most -= self.num_blocks(digest)
            if most < 0:
                return count
        return len(unseated)

    def seat(self, hold: Hold) -> AdapterSlot:
        """The request runs from now on; its weights stay in this slot meanwhile."""
        readiness = self.readiness(hold.digest)
        if not hold.is_open or hold.slot is not None or readiness is not Readiness.READY:
            raise RuntimeError(
                f"a request of adapter {hold.version.name!r} can't be seated: it is "
                f"{'open' if hold.is_open else 'over'}, in slot {hold.slot}, {readiness.value}"
            )
        hold.slot = self.slots.seat(hold.digest)
        return hold.slot

    def unseat(self, hold: Hold, *, is_in_flight: bool = True) -> None:
        """The request runs no more (finished, retracted, paused); launched steps may still
        compute it, unless the caller knows that none does."""
        if hold.slot is None:
            raise RuntimeError(f"a request of adapter {hold.version.name!r} has no seat to leave")
        hold.slot = None
        self.slots.unseat(hold.digest, is_in_flight)

    # Steps

    def prepare(self, wanted: Iterable[AdapterDigest]) -> Prepared:
        """Bring the adapters that a step wants to the device, most urgent first; of those that
        must wait for a slot, one at a time to the host.

        First all that can have a slot get their place in host memory, then the slots are given
        out; neither is ever taken from another of `wanted` that has one, from a seat, from a
        launched step or from a load. Seated adapters need not be named.
        """
        distinct = dict.fromkeys(wanted)
        self._check(distinct)
        slots: dict[AdapterDigest, AdapterSlot] = {}
        waiting: list[AdapterDigest] = []
        absent: list[AdapterDigest] = []
        for digest in distinct:
            slot = self.slots.find(digest)
            if slot is not None and not slot.is_loading:
                self.slots.touch(digest)
                slots[digest] = slot.number
                continue
            waiting.append(digest)
            if slot is None:
                absent.append(digest)
        if absent:
            self._start_loads(absent, keep=distinct)
        return Prepared(slots, tuple(waiting))

    def step_launched(self, step_id: StepId) -> None:
        """A step with the requests that are seated now is on its way."""
        self.slots.step_launched(step_id)
        self.transfers.num_launched += 1

    def step_done(self, step_id: StepId, seconds: float = 0.0) -> None:
        """The oldest launched step is over, well or not; it uses no slot any more. `seconds`: what
        it took, if that is known."""
        if seconds:
            self.transfers.step_done(seconds)
        for digest, ref in self.slots.step_done(step_id):
            self.transfers.drop(digest, Tier.DEVICE, ref)

    def acknowledge(self, answer: AdapterLoaded) -> LoadOutcome:
        """A load is over."""
        load = self.transfers.answer(answer)
        digest = load.digest
        if answer.error is None:
            if load.target is None:
                self.host.loosen(digest)
            else:
                self.slots.loaded(digest)
            if digest not in self.registry.contents:  # unloaded meanwhile
                self._give_up(digest)
        else:
            if load.target is not None:
                self.slots.disown(digest)
            self.left[digest] = f"host: it could not be loaded: {answer.error}"
            # A bad copy in host memory would fail again: the next try starts from storage.
            self.host.drop(digest)
            self.transfers.drop(digest, Tier.HOST)
        return LoadOutcome(digest, answer.error)

    @property
    def has_intents(self) -> bool:
        """Whether `flush` would give anything."""
        return bool(self.transfers.intents)

    @property
    def is_loading(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self.transfers.loads)

    def flush(self) -> tuple[AdapterIntent, ...]:
        """What the execute half must do now. Call after every step planned, and when idle."""
        return self.transfers.flush() if self.transfers.intents else ()

    def stats(self) -> AdapterStats:
        transfers, blocks = self.transfers, self.limits.blocks
        num_blocks, size = self.slots.num_blocks, 0 if blocks is None else blocks.block_bytes
        return AdapterStats(
            num_loaded=len(self.registry.loaded),
            num_draining=len(self.registry.draining),
            num_slots=self.slots.num_slots or 0,
            num_on_device=len(self.slots.by_owner) - transfers.num_slot_loads,
            num_on_host=len(self.host) - len(self.host.arriving),
            num_loading=len(transfers.loads),
            num_running=self.slots.num_seated,
            total_loads_from_host=transfers.total_loads[Tier.HOST],
            total_loads_from_storage=transfers.total_loads[Tier.STORAGE],
            total_failed_loads=transfers.total_failed_loads,
            total_device_evictions=self.total_device_evictions,
            total_host_evictions=self._total_host_evictions,
            total_device_unloads=self._total_device_unloads,
            total_host_unloads=self._total_host_unloads,
            device_bytes=num_blocks * size,
            used_device_bytes=(num_blocks - self.slots.num_free_blocks) * size,
        )

    # Inside

    def _check(self, wanted: dict[AdapterDigest, None]) -> None:
        """Refuse what no step could be; nothing has changed yet."""
        cap = self.limits.max_loras
        if cap and len(wanted) > cap:
            raise RuntimeError(
                f"a step wants {len(wanted)} adapters; --max-loras allows {cap} at once"
            )
        for digest in wanted:
            if digest not in self.registry.contents:
                raise RuntimeError(f"a step wants adapter {digest.hex()}, which is not loaded")

    def _pinned_beside(self, name: AdapterName) -> dict[AdapterDigest, AdapterSpec]:
        """What other names have pinned."""
        loaded = self.registry.loaded.values()
        return {v.digest: v.spec for v in loaded if v.is_pinned and v.name != name}

    def _check_size(self, name: AdapterName, spec: AdapterSpec) -> None:
        """Refuse what could never run beside pinned adapters."""
        blocks, limits = self.limits.blocks, self.limits
        if blocks is None:
            return
        pinned = self._pinned_beside(name)
        num_pinned = sum(limits.num_blocks(s) for d, s in pinned.items() if d != spec.digest)
        num_blocks = limits.num_blocks(spec)
        if num_blocks + num_pinned > blocks.num_blocks:
            size = blocks.block_bytes / 2**20
            left = (blocks.num_blocks - num_pinned) * size
            raise RequestError(
                f"adapter {name!r} takes {num_blocks * size:.1f} MiB on the device, and adapters "
                f"have {left:.1f} MiB there that are not pinned. "
                "Unload a pinned adapter, or start the server with --max-loras and a number.",
                field="lora_name",
            )

    def _check_pin(self, name: AdapterName, spec: AdapterSpec) -> None:
        """Refuse to pin the last slot, or memory that another adapter needs: it could never run."""
        pinned = {**self._pinned_beside(name), spec.digest: spec}
        blocks, num_blocks = self.limits.blocks, self.limits.num_blocks
        if blocks is not None:
            num_pinned = sum(map(num_blocks, pinned.values()))
            others = (v.spec for v in self.registry.loaded.values() if v.digest not in pinned)
            if num_pinned + max(map(num_blocks, others), default=1) > blocks.num_blocks:
                size = blocks.block_bytes / 2**20
                raise RequestError(
                    f"adapter {name!r} can't be pinned: pinned adapters would take "
                    f"{num_pinned * size:.1f} MiB of {blocks.num_blocks * size:.1f} MiB on the "
                    "device, and another adapter would never fit. Unload a pinned adapter.",
                    field="pinned",
                )
        if self.slots.num_slots is not None and len(pinned) >= self.slots.num_slots:
            raise RequestError(
                f"adapter {name!r} can't be pinned: of {self.slots.num_slots} slots one must stay "
                "free for adapters that are not. Raise --max-loras, or unload a pinned adapter.",
                field="pinned",
            )

    def _start_loads(self, absent: list[AdapterDigest], keep: Collection[AdapterDigest]) -> None:
        """Loads for as many as can have a slot, in order. One that is arriving on the host has a
        slot kept for it; of those without a slot, one may set out for the host."""
        needs = [self.num_blocks(digest) for digest in absent]
        put_out = self._make_room_on_device(needs, keep)
        num_slots = self.slots.room(needs)
        chosen = [digest for digest in absent[:num_slots] if digest not in self.host.arriving]
        self._load(chosen, put_out)
        self._fetch(absent[num_slots:], keep)

    def _make_room_on_device(
        self, needs: Sequence[int], keep: Collection[AdapterDigest]
    ) -> list[tuple[AdapterDigest, SlotRef]]:
        kept = {*keep, *self.registry.pinned}
        if self.lender is not None:
            self._borrow(self.lender, needs, kept)
        put_out = self.slots.make_room(needs, kept)
        for digest, _ in put_out:
            self.host.loosen(digest)
            self.total_device_evictions += 1
            self.left[digest] = "device: its slot was needed for another adapter"
        return put_out

    def _borrow(
        self, lender: Lender, needs: Sequence[int], kept: Collection[AdapterDigest]
    ) -> None:
        """Blocks that these needs lack come from where least is lost, pages or idle adapters; what
        idle adapters are to give is left to `make_room`."""
        slots = self.slots
        missing = sum(needs[: len(slots.free) + len(slots.idle)]) - slots.num_free_blocks
        for slot in self.slots.idle.values():
            if missing <= 0 or lender.is_cheaper(slot):
                break
            if slot.owner not in kept:
                missing -= slot.num_blocks
        if missing > 0:
            lender.lend(missing)

    def put_out_idle(self, may_go: Callable[[Slot, bool], bool], num_blocks: int) -> None:
        """Idle adapters leave the device, longest idle first, until so many blocks are free.
        `may_go` is asked of each, and told whether requests hold it, which will use it soon."""
        registry = self.registry
        for slot in list(self.slots.idle.values()):
            owner = slot.owner
            assert owner is not None
            if self.slots.num_free_blocks >= num_blocks:
                return
            versions = registry.contents[owner].versions
            is_held = any(registry.num_holds[version] for version in versions)
            if owner in registry.pinned or not may_go(slot, is_held):
                continue
            ref = self.slots.disown(owner)
            assert ref is not None, "an idle slot is used by no step"
            self.transfers.drop(owner, Tier.DEVICE, ref)
            self.host.loosen(owner)
            self.total_device_evictions += 1
            self.left[owner] = "device: its memory was needed for pages"

    def _drop_unused(self, put_out: list[tuple[AdapterDigest, SlotRef]]) -> None:
        """A load clears its slot; a slot that gets no load now would keep its weights."""
        for digest, ref in put_out:
            if self.slots.all[ref.slot].owner is None:
                self.transfers.drop(digest, Tier.DEVICE, ref)

    def _load(
        self, chosen: list[AdapterDigest], put_out: list[tuple[AdapterDigest, SlotRef]]
    ) -> None:
        """Into free slots, which there are. The memory of those put out is there first."""
        source = {d: Tier.HOST if d in self.host else Tier.STORAGE for d in chosen}
        # All copies that will be used are bound before any is dropped to make room. There is room
        # for all: slots are never more than host copies, and only owners of slots have copies
        # that can't be dropped.
        from_host = [digest for digest in chosen if source[digest] is Tier.HOST]
        for digest in from_host:
            self.host.bind(digest)
        self._evict_from_host(len(chosen) - len(from_host))
        refs = {digest: self.slots.assign(digest, self.num_blocks(digest)) for digest in chosen}
        self._drop_unused(put_out)
        for digest, ref in refs.items():
            self.host.bind(digest)
            self.transfers.load(self.registry.source(digest), source[digest], ref)

    def _fetch(self, without_slot: list[AdapterDigest], keep: Collection[AdapterDigest]) -> None:
        """The first of these that is in storage alone sets out for the host, if none is on its
        way: a second would hold up loads into slots."""
        if self.host.arriving:
            return
        for digest in without_slot:
            if digest in self.host:
                continue
            self._evict_from_host(1, keep)
            if self.host.has_room():
                self.host.expect(digest)
                self.transfers.load(self.registry.source(digest), Tier.STORAGE, None)
            return

    def _evict_from_host(self, count: int, keep: Collection[AdapterDigest] = frozenset()) -> None:
        for digest in self.host.make_room(count, keep):
            self.transfers.drop(digest, Tier.HOST)
            self._total_host_evictions += 1
            self.left[digest] = "host: its memory was needed for another adapter"

    def _free(self, freed: Iterable[AdapterDigest]) -> None:
        """These contents are no longer needed."""
        for digest in freed:
            slot = self.slots.find(digest)
            # A load under way can't be called back: its slot and copy go when it is answered.
            is_loading = digest in self.host.arriving or (slot is not None and slot.is_loading)
            if not is_loading:
                self._give_up(digest)

    def _give_up(self, digest: AdapterDigest) -> None:
        """Device slot and host copy of a content that is no longer needed."""
        self.left.pop(digest, None)
        if self.slots.find(digest) is not None:
            self._total_device_unloads += 1
            ref = self.slots.disown(digest)
            if ref is not None:
                self.transfers.drop(digest, Tier.DEVICE, ref)
        if self.host.drop(digest):
            self._total_host_unloads += 1
            self.transfers.drop(digest, Tier.HOST)
