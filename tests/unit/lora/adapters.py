"""Short ways to drive a `Residency` in tests; the audit runs after every call."""

from __future__ import annotations

from manyroots.ids import AdapterDigest, AdapterName, AdapterSlot, StepId, Tier
from manyroots.lora.audit import audit
from manyroots.lora.limits import AdapterLimits, DeviceBlocks
from manyroots.lora.outcomes import LoadOutcome, Readiness
from manyroots.lora.registry import Hold, Registered, Unloaded
from manyroots.lora.residency import Residency
from manyroots.lora.spec import AdapterSpec
from manyroots.step import AdapterLoaded, DropAdapter, LoadAdapter


def content(text: str) -> AdapterDigest:
    return AdapterDigest(text.encode())


class Adapters:
    """Adapters whose name is also their content, unless it is given."""

    def __init__(
        self,
        max_loras: int,
        max_cpu_loras: int = 0,
        num_spare_slots: int = 0,
        blocks: DeviceBlocks | None = None,
    ) -> None:
        limits = AdapterLimits(
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            num_spare_slots=num_spare_slots,
            blocks=blocks,
        )
        self.residency = Residency(limits)
        self.fetches: list[LoadAdapter] = []
        """Loads to the host alone that `flush` met."""

    def register(
        self, name: str, text: str | None = None, *, num_bytes: int = 1000, is_pinned: bool = False
    ) -> Registered:
        digest = content(text or name)
        registered = self.residency.register(
            AdapterName(name),
            AdapterSpec(digest, 8, num_bytes),
            path=f"/adapters/{name}",
            is_pinned=is_pinned,
        )
        audit(self.residency)
        return registered

    def unload(self, name: str) -> Unloaded:
        unloaded = self.residency.unload(AdapterName(name))
        audit(self.residency)
        return unloaded

    def acquire(self, name: str) -> Hold:
        return self.residency.acquire(AdapterName(name))

    def seat(self, hold: Hold) -> AdapterSlot:
        slot = self.residency.seat(hold)
        audit(self.residency)
        return slot

    def end(self, hold: Hold) -> tuple[AdapterDigest, ...]:
        """The request is over, seated or not."""
        if hold.slot is not None:
            self.residency.unseat(hold)
        freed = self.residency.release(hold)
        audit(self.residency)
        return freed

    def prepare(self, *texts: str) -> list[str]:
        """Gives those that must wait."""
        prepared = self.residency.prepare(content(text) for text in texts)
        audit(self.residency)
        return [digest.decode() for digest in prepared.waiting]

    def launch(self, step_id: int) -> None:
        self.residency.step_launched(StepId(step_id))
        audit(self.residency)

    def done(self, step_id: int) -> None:
        self.residency.step_done(StepId(step_id))
        audit(self.residency)

    def answer(self, load: LoadAdapter, error: str | None = None) -> LoadOutcome:
        outcome = self.residency.acknowledge(AdapterLoaded(load.load_id, error))
        audit(self.residency)
        return outcome

    def flush(self) -> tuple[list[LoadAdapter], list[DropAdapter]]:
        """Loads into slots, and drops."""
        intents = self.residency.flush()
        loads = [intent for intent in intents if isinstance(intent, LoadAdapter)]
        self.fetches += [load for load in loads if load.target is None]
        drops = [intent for intent in intents if isinstance(intent, DropAdapter)]
        return [load for load in loads if load.target is not None], drops

    def end_fetches(self, error: str | None = None) -> list[str]:
        """Loads to the host alone are over. Gives whose."""
        fetches, self.fetches = self.fetches, []
        for fetch in fetches:
            self.answer(fetch, error)
        return [fetch.digest.decode() for fetch in fetches]

    def bring(self, *texts: str) -> None:
        """Have these on the device."""
        for text in texts:
            if text not in self.on_device():
                self.prepare(text)
                (load,) = self.flush()[0]
                self.answer(load)

    def begin(self, name: str) -> Hold:
        """A request that runs."""
        hold = self.acquire(name)
        self.bring(hold.digest.decode())
        self.seat(hold)
        return hold

    def is_ready(self, text: str) -> bool:
        return self.residency.readiness(content(text)) is Readiness.READY

    def on_device(self) -> set[str]:
        slots = self.residency.slots.by_owner.items()
        return {digest.decode() for digest, slot in slots if not slot.is_loading}

    def on_host(self) -> set[str]:
        host = self.residency.host
        return {digest.decode() for digest in host.bound | set(host.loose)}


def named(drops: list[DropAdapter]) -> list[tuple[str, Tier]]:
    return [(drop.digest.decode(), drop.tier) for drop in drops]
