"""Recurrent state: one state summarises all tokens so far; only checkpoints can be resumed from.

A running request has a working state. A checkpoint is a copy of it at a page boundary, taken by a
step that ends exactly there (C05), where reuse is likely (H12). That is every `interval` pages, at
the last whole page of the prompt, and where another prompt was seen to diverge.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.cache.families.family import Family
from manyroots.step import Bools


@dataclass(frozen=True, slots=True)
class RecurrentState(Family):
    """The state after a page's last token."""

    interval: int
    """Most pages of a prompt between two checkpoints."""
    least_saved: int = 1
    """Pages that a checkpoint must save beyond the previous one."""

    @property
    def shares_within_step(self) -> bool:
        return False

    @property
    def is_ordered(self) -> bool:
        return False

    @property
    def is_state(self) -> bool:
        return True

    @property
    def reach(self) -> int:
        return 1  # the one state at exactly this boundary

    def resumable(self, present: Bools) -> Bools:
        return present

    def first_needed(self, num_tokens: int) -> int:
        raise TypeError("a state is not read page by page")


def recurrent_families(
    count: int, *, interval: int, least_saved: int = 1
) -> tuple[RecurrentState, ...]:
    """One for each kind of states of a model. Names differ."""
    names = ("state", *(f"state-{number}" for number in range(2, count + 1)))
    return tuple(RecurrentState(name, interval, least_saved) for name in names[:count])
