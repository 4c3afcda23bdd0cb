"""Prompts that no server has seen: random words, drawn anew for each run.

Takes a seed and a length in words; gives texts that share no beginning.
"""

from __future__ import annotations

import random
import string

_TEXT = (
    "amber anchor arrow autumn barley basket beacon birch bottle branch bridge bronze butter "
    "candle canyon carbon castle cedar chalk circle clover copper corner cotton cradle crystal "
    "damson desert drawer eagle ember engine fabric falcon feather fiddle forest garden ginger "
    "granite hammer harbor hazel helmet honey island ivory jacket kettle ladder lantern lemon "
    "linen marble meadow mirror mortar needle nickel olive orchard oyster paper pebble pepper "
    "pillow planet pocket quartz rabbit ribbon river saddle salmon shadow silver spindle stable "
    "summer sunset temple thimble timber tunnel valley velvet violet walnut water willow window"
)


class FreshPrompts:
    """Draws prompts. Another seed gives other prompts, so that a later run finds nothing of it."""

    def __init__(self, seed: int, num_words: int) -> None:
        self._rng = random.Random(seed)
        self._words = _TEXT.split()
        self.num_words = num_words

    def draw(self, num_words: int | None = None) -> str:
        count = self.num_words if num_words is None else num_words
        # Caches that know single tokens find the beginning that two prompts share by chance.
        words = ["".join(self._rng.choices(string.ascii_lowercase + string.digits, k=12))]
        return " ".join([*words, *self._rng.choices(self._words, k=count - 1)])

    def word(self) -> str:
        """For names and salts."""
        return f"kit{self._rng.randrange(16**8):08x}"
