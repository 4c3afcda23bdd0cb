"""The cache's results: grants, refusals, counts. Data only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from manyroots.ids import Tier
from manyroots.messages import StorageStats


class Refusal(enum.Enum):
    """The reason that the cache refused; nothing has changed then."""

    NO_ROOM = "no room"
    TOO_LARGE = "there will never be room for all of it"
    """To questions to storage alone (T04)."""
    CANNOT_REWIND = "a family of layers would save a state of guessed tokens"
    """To drafts alone (P11): with states, they must end before their page does."""


class Ending(enum.Enum):
    """How a lease ends."""

    FINISHED = "finished"
    """It may continue from its last token, as a next turn or after a retraction: the newest state
    is worth keeping (H05)."""
    LEFT = "left"
    """Ended from outside, by a stop string or a client. The next turn may lack the last tokens, so
    the state before the newest one is also worth keeping."""
    DROPPED = "dropped"
    """Failed, or never started."""


Extension = tuple[int, ...]
"""By family: where the new units for a step begin in its table."""


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
    missed_tokens: dict[str, int]
    """By reason (S07): tokens of whole pages that were looked up and not found."""
    total_skipped_checkpoints: int
    total_failed_units: int
    storage: StorageStats | None


@dataclass(frozen=True, slots=True)
class Evicted:
    """What evicting a namespace freed at once, by plane; held units are freed when they are
    released."""

    num_freed: tuple[int, ...]
