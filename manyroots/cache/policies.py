"""What a user may choose about the cache's lower tiers and checkpoints; frozen."""

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


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Load or recompute: what each takes (T05). Measured by the execute half."""

    seconds_per_page: float
    seconds_per_token: float

    def is_worth_loading(self, num_pages: int, num_tokens: int) -> bool:
        return num_pages * self.seconds_per_page < num_tokens * self.seconds_per_token


FREE_LOADS = LoadCosts(seconds_per_page=0.0, seconds_per_token=1.0)


@dataclass(frozen=True, slots=True)
class CachePolicies:
    """Choices that change what is kept, never what is right."""

    reuse: bool = True
    """False: nothing is published or found."""
    write_back: WriteBack = WriteBack.THROUGH
    load_costs: LoadCosts = FREE_LOADS
    uses_storage: bool = False
    records_events: bool = False
    identity: bytes = b""
    """Stands for model, dtype and layout in page hashes."""
    low_water: float = 0.1
    """With EVICTION: the share of the device below which write-back begins."""
