"""Sliding window: a token reads itself and the `window - 1` tokens before it, nothing older."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from manyroots.cache.families.family import Family, consecutive
from manyroots.step import Bools


@dataclass(frozen=True, slots=True)
class SlidingWindow(Family):
    """Keys and values of the newest tokens."""

    window: int
    """Tokens that one token sees, including itself."""
    page_size: int

    @property
    def shares_within_step(self) -> bool:
        return True

    @property
    def is_ordered(self) -> bool:
        return False

    @property
    def is_state(self) -> bool:
        return False

    @property
    def reach(self) -> int:
        return -(-(self.window - 1) // self.page_size)

    def resumable(self, present: Bools) -> Bools:
        boundaries = np.arange(1, len(present) + 1)
        result: Bools = consecutive(present) >= np.minimum(boundaries, self.reach)
        return result

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - (self.window - 1)) // self.page_size

    def most_needed(self, num_tokens: int) -> int:
        seen = self.window - 1 + num_tokens
        return (seen - 2) // self.page_size + 2  # a page starts after the first visible token
