"""What the cache must know of a way to remember: frozen data and a small policy, no state.

A **unit** is what a family keeps of one page: its keys and values, or the state behind its last
token. Boundary b lies behind b pages; page i ends at boundary i + 1. Presence arrays have one
entry per page of a path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from manyroots.step import Bools


@dataclass(frozen=True, slots=True)
class Family(ABC):
    """One way a layer remembers, as the cache sees it."""

    name: str

    @property
    @abstractmethod
    def shares_within_step(self) -> bool:
        """Whether a unit may be read by other rows of the very step that fills it (P02, P08).

        True where every layer writes a step's keys and values before any row attends.
        """

    @property
    @abstractmethod
    def is_ordered(self) -> bool:
        """Whether a unit is of no use without all units before it."""

    @property
    @abstractmethod
    def is_state(self) -> bool:
        """Whether a running request has one working unit, and pages have checkpoints of it."""

    @property
    def reach(self) -> int | None:
        """How many units before a boundary are read by what resumes there, where a path may lack
        those before; None where any unit may be read, or one stands for all."""
        return None

    @abstractmethod
    def resumable(self, present: Bools) -> Bools:
        """Entry i: with these units present, can boundary i + 1 be resumed from?"""

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """The first page whose unit is read by the token behind `num_tokens` computed ones."""

    def most_needed(self, num_tokens: int) -> int | None:
        """How many units a step of so many tokens needs at most, wherever in a sequence it is; None
        if all that come before, so that there is no such number."""
        return None


def consecutive(present: Bools) -> np.ndarray:
    """Entry i: how many units in a row, up to and including i, are present."""
    places = np.arange(len(present))
    last_hole = np.maximum.accumulate(np.where(present, -1, places))
    return places - last_hole
