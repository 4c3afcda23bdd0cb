"""What the cache answers: grants, refusals, counts. Data alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from manyroots.ids import Tier
from manyroots.step import Int32s


class Refusal(enum.Enum):
    """Why the cache could not do as asked; nothing has changed then."""

    NO_ROOM = "no room"


class Ending(enum.Enum):
    """How a lease ends."""

    FINISHED = "finished"
    """The next turn may come: the newest state is worth keeping (H05)."""
    DROPPED = "dropped"
    """Aborted, failed or retracted."""


class Extension(NamedTuple):
    """What a lease got for a step."""

    first: tuple[int, ...]
    """By family: where in its table the new units begin."""
    units: tuple[Int32s, ...]


@dataclass(frozen=True, slots=True)
class PlaneStats:
    """Counts that balance: free + cached + held = total."""

    family: str
    tier: Tier
    num_units: int
    num_free: int
    num_cached: int
    num_held: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts by plane, and totals since start."""

    planes: tuple[PlaneStats, ...]
    total_lookup_tokens: int
    total_hit_tokens: int
    total_host_hit_tokens: int
    total_skipped_checkpoints: int
    total_failed_units: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What evicting a namespace freed at once, by plane; what is held goes when it is released."""

    num_freed: tuple[int, ...]
