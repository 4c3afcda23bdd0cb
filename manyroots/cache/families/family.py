"""What the cache must know of a way to remember: frozen data, no state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One way a layer remembers, as the cache sees it."""

    name: str
    shares_within_step: bool
    """Whether a page may be read by other rows of the very step that fills it (ledger P02, P08).

    True where every layer writes a step's keys and values before any row attends.
    """
