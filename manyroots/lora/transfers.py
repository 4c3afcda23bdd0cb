"""Intents not handed over yet, loads not answered yet, and counts of both.

Intents leave in the order they were made: a copy dropped to make room goes before the load that
needs the room.
"""

from __future__ import annotations

from collections import deque

from manyroots.ids import AdapterDigest, Tier
from manyroots.lora.registry import AdapterVersion
from manyroots.step import AdapterIntent, AdapterLoaded, DropAdapter, LoadAdapter, LoadId, SlotRef

KEPT = 0.8
"""How much earlier loads count when a new one was measured."""
NUM_RECENT = 9
"""So many loads tell how long the next will take."""
FIRST_GUESS_STEPS = 2
"""What a short load takes where a step is planned while another runs."""


class LoadSteps:
    """For how many steps adapters could not be used because their weights were on their way."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=NUM_RECENT)

    def note(self, num_steps: int) -> None:
        self._recent.append(num_steps)

    @property
    def expected(self) -> int:
        """The middle one of the last few."""
        if not self._recent:
            return FIRST_GUESS_STEPS
        return sorted(self._recent)[len(self._recent) // 2]

    @property
    def longest(self) -> int:
        """The longest of the last few."""
        return max(self._recent, default=FIRST_GUESS_STEPS)


class LoadSeconds:
    """Seconds for which requests wait for a byte from one tier; newer loads count more."""

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            self._num_bytes = KEPT * self._num_bytes + num_bytes
            self._seconds = KEPT * self._seconds + seconds

    @property
    def per_byte(self) -> float | None:
        """None before the first load that was measured."""
        return self._seconds / self._num_bytes if self._num_bytes else None


class AdapterTransfers:
    """What the execute half is asked and has not answered."""

    def __init__(self) -> None:
        self.loads: dict[LoadId, LoadAdapter] = {}
        """Those without an answer yet."""
        self.intents: list[AdapterIntent] = []
        """Those not handed over yet."""
        self.total_loads = {Tier.HOST: 0, Tier.STORAGE: 0}
        self.total_failed_loads = 0
        self.load_steps = {Tier.HOST: LoadSteps(), Tier.STORAGE: LoadSteps()}
        """By source, what loads took."""
        self.load_seconds = {Tier.HOST: LoadSeconds(), Tier.STORAGE: LoadSeconds()}
        self._next_load_id = 1
        self.num_launched = 0
        """Steps, so far."""
        self._asked_at: dict[LoadId, int] = {}
        self._step_s = 0.0
        """What a step takes, lately."""

    def load(self, version: AdapterVersion, source: Tier, target: SlotRef | None) -> None:
        """`target`: None for a load that ends in host memory."""
        load_id = LoadId(self._next_load_id)
        self._next_load_id += 1
        load = LoadAdapter(
            load_id,
            version.digest,
            source,
            target,
            path=version.path,
            num_bytes=version.spec.num_bytes,
        )
        self.loads[load_id] = load
        self._asked_at[load_id] = self.num_launched
        self.intents.append(load)
        self.total_loads[source] += 1

    def drop(self, digest: AdapterDigest, tier: Tier, target: SlotRef | None = None) -> None:
        self.intents.append(DropAdapter(digest, tier, target))

    def keep_on_host(self, digest: AdapterDigest) -> None:
        """A new copy is there before the drop of an old one was handed over: nothing to drop."""
        dropped = DropAdapter(digest, Tier.HOST)
        self.intents = [intent for intent in self.intents if intent != dropped]

    @property
    def num_slot_loads(self) -> int:
        """Loads without an answer that end on the device."""
        return sum(load.target is not None for load in self.loads.values())

    @property
    def oldest_load_steps(self) -> int:
        """For how many steps the oldest load without an answer is under way."""
        return max((self.num_launched - at for at in self._asked_at.values()), default=0)

    def answer(self, answer: AdapterLoaded) -> LoadAdapter:
        """The load that this answers, which is over now."""
        load = self.loads.pop(answer.load_id, None)
        if load is None:
            raise RuntimeError(f"load {answer.load_id} was answered, but is not under way")
        self.load_steps[load.source].note(self.num_launched - self._asked_at.pop(load.load_id))
        if load.target is not None and answer.error is None and answer.seconds:
            # However quick the copy was, its requests could not be in the step that ran meanwhile.
            self.load_seconds[load.source].note(load.num_bytes, answer.seconds + self._step_s)
        self.total_failed_loads += int(answer.error is not None)
        return load

    def step_done(self, seconds: float) -> None:
        self._step_s = KEPT * self._step_s + (1 - KEPT) * seconds

    def flush(self) -> tuple[AdapterIntent, ...]:
        intents, self.intents = tuple(self.intents), []
        return intents
