"""What the cache knows of a kind of memory: frozen data and a small policy, no state.

A **unit** is what a family keeps of one page: its keys and values, or the state after its last
token. Boundary b comes after b pages; page i ends at boundary i + 1. Presence arrays have one entry
per page of a path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from manyroots.step import Bools


@dataclass(frozen=True, slots=True)
class Family(ABC):
    """One kind of memory, for the cache."""

    name: str

    @property
    @abstractmethod
    def shares_within_step(self) -> bool:
        """Whether other rows may read a unit in the step that fills it (P02, P08).

        True if every layer writes a step's keys and values before any row attends.
        """

    @property
    @abstractmethod
    def is_ordered(self) -> bool:
        """Whether a unit is useless without all units before it."""

    @property
    @abstractmethod
    def is_state(self) -> bool:
        """Whether a running request has one working unit, and pages have checkpoints of it."""

    @property
    def reach(self) -> int | None:
        """The number of units before a boundary that a request reads when it resumes there, if
        earlier ones may be missing. None if any unit may be read, or if one unit summarises all."""
        return None

    @abstractmethod
    def resumable(self, present: Bools) -> Bools:
        """Entry i: whether boundary i + 1 can be resumed from with these units."""

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """The first page whose unit the token after `num_computed` tokens reads."""

    def most_needed(self, num_tokens: int) -> int | None:
        """The most units that a step of this many tokens needs, anywhere in a sequence. None if it
        needs all earlier ones."""
        return None


def consecutive(present: Bools) -> np.ndarray:
    """Entry i: how many units in a row, up to and including i, are present."""
    places = np.arange(len(present))
    last_hole = np.maximum.accumulate(np.where(present, -1, places))
    return places - last_hole
