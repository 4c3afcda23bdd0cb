"""What may be chosen about eviction, the cache's lower tiers and checkpoints; frozen."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WriteBack(enum.Enum):
    """When device units are copied to the host."""

    THROUGH = "through"
    """As soon as they are published."""
    REUSED = "reused"
    """When they have been found once: what nobody asks for again is not worth a copy."""
    EVICTION = "eviction"
    """When room on the device runs low."""


class Eviction(enum.Enum):
    """What goes when room is needed."""

    FORKS = "forks"
    """What was used longest ago, but prefixes that several requests share last, within a share of
    the pool that is learned (`fork_share.py`)."""
    LRU = "lru"
    """What was used longest ago: to compare with."""


class Prefetch(enum.Enum):
    """Whether a request waits for what storage was asked for on its behalf (T04)."""

    BEST_EFFORT = "best-effort"
    """No: it begins when its turn comes, with what has arrived by then."""
    WAIT = "wait"
    """Until storage has answered."""
    TIMEOUT = "timeout"
    """For a number of steps at most."""


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Load or recompute: what each is taken to take before it was measured (T05)."""

    seconds_per_page: float
    """From the host to the device."""
    seconds_per_token: float
    """To compute one of a prompt."""
    storage_seconds_per_page: float = 0.0
    """From storage to the host."""


FREE_LOADS = LoadCosts(seconds_per_page=0.0, seconds_per_token=1.0)


@dataclass(frozen=True, slots=True)
class CachePolicies:
    """Choices that change what is kept, never what is right."""

    reuse: bool = True
    """False: nothing is published or found."""
    eviction: Eviction = Eviction.FORKS
    write_back: WriteBack = WriteBack.THROUGH
    load_costs: LoadCosts = FREE_LOADS
    uses_storage: bool = False
    prefetch: Prefetch = Prefetch.WAIT
    prefetch_timeout_steps: int = 32
    """With TIMEOUT. In steps, because the decide half has no clock: what a wait costs others is
    counted in steps, and where there are none storage is all there is to wait for."""
    overlaps_loads: bool = False
    """Whether a request that is alone may begin while its pages come from the host (T10)."""
    records_events: bool = False
    identity: bytes = b""
    """Stands for model, dtype and layout in page hashes."""
    low_water: float = 0.1
    """With EVICTION: the share of the device below which write-back begins."""

    @property
    def patience_steps(self) -> int | None:
        """For how many steps a request waits for storage; None is as long as it takes."""
        match self.prefetch:
            case Prefetch.BEST_EFFORT:
                return 0
            case Prefetch.TIMEOUT:
                return self.prefetch_timeout_steps
            case Prefetch.WAIT:
                return None
