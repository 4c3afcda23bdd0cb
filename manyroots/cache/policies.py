"""Settings of eviction, of the lower tiers and of checkpoints; frozen."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WriteBack(enum.Enum):
    """When device units are copied to the host."""

    THROUGH = "through"
    """As soon as they are published."""
    REUSED = "reused"
    """After they have been found once: a prefix that no request repeats is not worth a copy."""
    EVICTION = "eviction"
    """When the device runs out of memory."""


class Eviction(enum.Enum):
    """Which units are evicted when memory is needed."""

    FORKS = "forks"
    """The least recently used. Prefixes that several requests share go last, within a share of the
    pool that is learned (`fork_share.py`)."""
    LRU = "lru"
    """The least recently used; for comparison."""


class Prefetch(enum.Enum):
    """Whether a request waits for pages that storage was asked for (T04)."""

    BEST_EFFORT = "best-effort"
    """No: it starts when it can, with what has arrived by then."""
    WAIT = "wait"
    """Until storage has answered."""
    TIMEOUT = "timeout"
    """For a number of steps at most."""


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Load or recompute: assumed costs before the first measurement (T05)."""

    seconds_per_page: float
    """From the host to the device."""
    seconds_per_token: float
    """To compute one token of a prompt."""
    storage_seconds_per_page: float = 0.0
    """From storage to the host."""


FREE_LOADS = LoadCosts(seconds_per_page=0.0, seconds_per_token=1.0)


@dataclass(frozen=True, slots=True)
class CachePolicies:
    """Choices that change what is kept, never the results."""

    reuse: bool = True
    """False: nothing is published or found."""
    eviction: Eviction = Eviction.FORKS
    write_back: WriteBack = WriteBack.THROUGH
    load_costs: LoadCosts = FREE_LOADS
    uses_storage: bool = False
    prefetch: Prefetch = Prefetch.WAIT
    prefetch_timeout_steps: int = 32
    """With TIMEOUT. In steps, because the decide half has no clock: a wait's cost to other requests
    is counted in steps. Without steps, there is nothing else to wait for."""
    overlaps_loads: bool = False
    """Whether a single request may start while its pages arrive from the host (T10)."""
    records_events: bool = False
    identity: bytes = b""
    """Identifies model, dtype and layout in page hashes."""
    low_water: float = 0.1
    """With EVICTION: the free share of the device below which write-back starts."""

    @property
    def patience_steps(self) -> int | None:
        """For how many steps a request waits for storage; None: without a limit."""
        match self.prefetch:
            case Prefetch.BEST_EFFORT:
                return 0
            case Prefetch.TIMEOUT:
                return self.prefetch_timeout_steps
            case Prefetch.WAIT:
                return None
