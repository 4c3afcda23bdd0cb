"""Full attention: every earlier token is read, so any page boundary can be resumed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyroots.cache.families.family import Family
from manyroots.step import Bools


@dataclass(frozen=True, slots=True)
class FullAttention(Family):
    """Keys and values of all tokens."""

    @property
    def shares_within_step(self) -> bool:
        return True

    @property
    def is_ordered(self) -> bool:
        return True

    @property
    def is_state(self) -> bool:
        return False

    def resumable(self, present: Bools) -> Bools:
        return np.logical_and.accumulate(present)

    def first_needed(self, num_tokens: int) -> int:
        return 0


FULL_ATTENTION = FullAttention("full")
