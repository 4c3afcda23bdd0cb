"""What `Residency` answers: small frozen data."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from manyroots.ids import AdapterDigest, AdapterSlot


class Readiness(enum.Enum):
    """Whether a request of an adapter could begin now."""

    READY = "ready"
    """`seat` will give it a slot."""
    LOADING = "loading"
    """Its weights are on their way; nothing to do but wait."""
    ABSENT = "absent"
    """Its weights are not on the device; `prepare` starts their load when there is room."""
    CAPPED = "capped"
    """As many other adapters as one step may have are running."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where the adapters that a step wants are."""

    slots: dict[AdapterDigest, AdapterSlot]
    """Those whose weights are on the device."""
    waiting: tuple[AdapterDigest, ...]
    """The others: their loads are on their way, or must wait for a slot."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """A load is over."""

    digest: AdapterDigest
    error: str | None
    """If not None: the adapter's waiting requests fail with it. Wanting it again tries again."""
