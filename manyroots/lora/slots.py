"""Device slots: the owner of each, and which may be given to another.

A slot is in exactly one of these states:

    free      no adapter's
    loading   its owner's weights are on their way into it
    seated    running requests use it
    cooling   no running request uses it, but a launched step may
    idle      its owner's weights are there and unused; up for eviction, longest idle first
    leaving   cooling, and free afterwards: its owner was unloaded

Steps are done in the order they are launched, so that a slot need only remember the last one that
may use it. A step costs nothing here, however many adapters are in it; only requests that begin
and end do. Ties break on order: lowest free slot, first to become idle.

Memory may be counted, too: in blocks, of which each owner takes some. A slot is then an address,
and blocks are what may run out. Their number changes where pages use the same memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence

from manyroots.ids import AdapterDigest, AdapterSlot, StepId
from manyroots.step import SlotRef


class Slot:
    """One adapter's space on the device. Only `DeviceSlots` changes it."""

    __slots__ = (
        "busy_until",
        "generation",
        "idle_since",
        "is_leaving",
        "is_loading",
        "num_blocks",
        "num_seats",
        "number",
        "owner",
    )

    def __init__(self, number: AdapterSlot) -> None:
        self.number = number
        self.generation = 0
        """Counts owners."""
        self.owner: AdapterDigest | None = None
        self.is_loading = False
        self.is_leaving = False
        self.num_blocks = 0
        """Its owner's."""
        self.num_seats = 0
        """Running requests that use it."""
        self.busy_until: StepId | None = None
        """The last launched step that may use it for a request that has left."""
        self.idle_since = 0
        """When it was last used or wanted, by the clock that the slots are given."""

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.number, self.generation)


class DeviceSlots:
    """Slots by owner, and the steps that hold on to them."""

    def __init__(self, num_slots: int | None, num_blocks: int = 0) -> None:
        self.num_slots = num_slots
        """None: slots are made as needed."""
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self.num_seated_blocks = 0
        """Of adapters that running requests use."""
        self.all = [Slot(AdapterSlot(number)) for number in range(num_slots or 0)]
        self.by_owner: dict[AdapterDigest, Slot] = {}
        self.free = [slot.number for slot in self.all]
        """A heap, so that the lowest goes first."""
        self.idle: dict[AdapterSlot, Slot] = {}
        """Longest idle first."""
        self.cooling: deque[tuple[StepId, Slot]] = deque()
        """When to look at a slot again; out of date if its `busy_until` is another step."""
        self.launched: deque[StepId] = deque()
        self.num_seated = 0
        """Distinct adapters that running requests use."""
        self.total_reused = 0
        """Idle adapters that requests used again, each as often as it was."""
        self.clock: Callable[[], int] = int
        """When idle slots were last used is told by this one."""

    def find(self, digest: AdapterDigest) -> Slot | None:
        return self.by_owner.get(digest)

    # Owners

    def touch(self, digest: AdapterDigest) -> None:
        """The owner is wanted again: of the idle ones, it goes last."""
        slot = self.by_owner[digest]
        if self.idle.pop(slot.number, None) is not None:
            self._rest(slot)

    def resize(self, num_blocks: int) -> None:
        """There are so many blocks from now on; those that owners have stay theirs."""
        self.num_free_blocks += num_blocks - self.num_blocks
        self.num_blocks = num_blocks
        assert self.num_free_blocks >= 0, "blocks were taken from an adapter that has them"

    def make_room(
        self, needs: Sequence[int], keep: Collection[AdapterDigest]
    ) -> list[tuple[AdapterDigest, SlotRef]]:
        """Make room for owners that need so many blocks each, or for as many of the first of them
        as there can be. Idle owners but those of `keep` are put out, longest idle first.

        Gives the owners that were put out, and from where, in order.
        """
        if self.num_slots is None or self.room(needs) == len(needs):
            return []
        idle = [slot for slot in self.idle.values() if slot.owner not in keep]
        num_slots = len(self.free) + len(idle)
        num_blocks = self.num_free_blocks + sum(slot.num_blocks for slot in idle)
        count = _num_within(needs, num_slots, num_blocks)
        num_slots, num_blocks = count - len(self.free), sum(needs[:count]) - self.num_free_blocks
        chosen: list[Slot] = []
        for slot in idle:
            if num_slots <= 0 and num_blocks <= 0:
                break
            chosen.append(slot)
            num_slots -= 1
            num_blocks -= slot.num_blocks
        for slot in reversed(chosen[:-1]):  # the last was needed, whatever came before it
            if num_slots < 0 and num_blocks + slot.num_blocks <= 0:
                chosen.remove(slot)
                num_slots += 1
                num_blocks += slot.num_blocks
        victims: list[tuple[AdapterDigest, SlotRef]] = []
        for slot in chosen:
            assert slot.owner is not None
            victims.append((slot.owner, slot.ref))
            self.disown(slot.owner)
        return victims

    def room(self, needs: Sequence[int]) -> int:
        """How many of the first of these new owners there is room for now."""
        if self.num_slots is None:
            return len(needs)
        return _num_within(needs, len(self.free), self.num_free_blocks)

    def assign(self, digest: AdapterDigest, num_blocks: int = 0) -> SlotRef:
        """A new owner for a free slot, whose weights are on their way."""
        if not self.free and self.num_slots is None:
            self.all.append(Slot(AdapterSlot(len(self.all))))
            slot = self.all[-1]
        else:
            slot = self.all[heapq.heappop(self.free)]
        slot.owner = digest
        slot.num_blocks = num_blocks
        self.num_free_blocks -= num_blocks
        slot.generation += 1
        slot.is_loading = True
        self.by_owner[digest] = slot
        return slot.ref

    def loaded(self, digest: AdapterDigest) -> None:
        """The owner's weights are there."""
        slot = self.by_owner[digest]
        slot.is_loading = False
        self._rest(slot)

    def disown(self, digest: AdapterDigest) -> SlotRef | None:
        """The owner leaves. None if a launched step may use the slot: `step_done` frees it then."""
        slot = self.by_owner.pop(digest)
        slot.is_loading = False
        self.idle.pop(slot.number, None)
        if slot.busy_until is not None:
            slot.is_leaving = True
            return None
        self._vacate(slot)
        return slot.ref

    def _vacate(self, slot: Slot) -> None:
        slot.owner = None
        self.num_free_blocks += slot.num_blocks
        slot.num_blocks = 0
        slot.is_leaving = False
        heapq.heappush(self.free, slot.number)

    # Running requests and steps

    def seat(self, digest: AdapterDigest) -> AdapterSlot:
        """A running request uses the owner's slot, whose weights are there."""
        slot = self.by_owner[digest]
        if slot.num_seats == 0:
            self.num_seated += 1
            self.num_seated_blocks += slot.num_blocks
            if self.idle.pop(slot.number, None) is not None:
                self.total_reused += 1
        slot.num_seats += 1
        return slot.number

    def unseat(self, digest: AdapterDigest, is_in_flight: bool) -> None:
        """The request has stopped running; launched steps may still compute it, or not."""
        slot = self.by_owner[digest]
        slot.num_seats -= 1
        if is_in_flight and self.launched and slot.busy_until != self.launched[-1]:
            slot.busy_until = self.launched[-1]
            self.cooling.append((slot.busy_until, slot))
        if slot.num_seats == 0:
            self.num_seated -= 1
            self.num_seated_blocks -= slot.num_blocks
            if slot.busy_until is None:
                self._rest(slot)

    def step_launched(self, step_id: StepId) -> None:
        """A step that uses the seated slots is on its way."""
        if self.launched and step_id <= self.launched[-1]:
            raise RuntimeError(f"step {step_id} was launched after step {self.launched[-1]}")
        self.launched.append(step_id)

    def step_done(self, step_id: StepId) -> list[tuple[AdapterDigest, SlotRef]]:
        """The oldest launched step is over. Gives the slots that are free now, and whose."""
        if not self.launched or self.launched[0] != step_id:
            raise RuntimeError(f"step {step_id} is done, but launched are {list(self.launched)}")
        self.launched.popleft()
        freed = []
        while self.cooling and self.cooling[0][0] <= step_id:
            due, slot = self.cooling.popleft()
            if slot.busy_until != due:
                continue  # used again since; a later entry stands for that
            slot.busy_until = None
            if slot.is_leaving:
                assert slot.owner is not None
                freed.append((slot.owner, slot.ref))
                self._vacate(slot)
            elif slot.num_seats == 0:
                self._rest(slot)
        return freed

    def _rest(self, slot: Slot) -> None:
        slot.idle_since = self.clock()
        self.idle[slot.number] = slot


def _num_within(needs: Sequence[int], num_slots: int, num_blocks: int) -> int:
    """How many of the first of these, each with a slot and blocks, so much room holds."""
    for count, need in enumerate(needs[:num_slots]):
        num_blocks -= need
        if num_blocks < 0:
            return count
    return min(len(needs), num_slots)
