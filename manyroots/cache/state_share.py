"""What states get of a memory that they share with pages (F09).

In: what a state and a page of all layers take, and what requests may look like. Out: bytes for
pages, and states for so many pages.

First come the working states: one for each sequence that may run. The rest is for pages and
checkpoints, by what a conversation keeps of either: all pages, and the checkpoints at the end of
its prompt and of its output and at each interval. What share that is depends on how long it is; as
between families of pages, each gets memory in proportion to the largest share that it has at any
length.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from manyroots.cache.split import SHORT

ENDS = 2
"""Checkpoints of a conversation besides those by interval: behind its prompt and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShare:
    """How many states there are beside so many bytes of pages."""

    state_bytes: int
    """Of one state of every family that has them."""
    token_bytes: Fraction
    """Of a token's keys and values in all layers."""
    num_working: int
    interval_tokens: int
    checkpoint_bytes: int | None
    """None: by what conversations keep."""

    @property
    def working_bytes(self) -> int:
        return self.num_working * self.state_bytes

    def pages_bytes(self, num_bytes: int, max_model_len: int) -> int:
        """What pages get of `num_bytes`; below zero if there is not enough for the states."""
        rest = num_bytes - self.working_bytes
        if self.checkpoint_bytes is not None:
            return rest - self.checkpoint_bytes
        return int(rest / (1 + self._per_page_byte(max_model_len)))

    def num_states(self, pages_bytes: int, max_model_len: int) -> int:
        """Working ones and checkpoints beside pages of so many bytes."""
        if self.checkpoint_bytes is None:
            num_bytes = int(pages_bytes * self._per_page_byte(max_model_len))
        else:
            num_bytes = self.checkpoint_bytes
        return self.num_working + num_bytes // self.state_bytes

    def _per_page_byte(self, max_model_len: int) -> Fraction:
        """Bytes of checkpoints for each byte of pages."""
        lengths = {min(SHORT, max_model_len), max_model_len}
        shares = [self._share(num_tokens) for num_tokens in sorted(lengths)]
        return max(shares) / max(1 - share for share in shares)

    def _share(self, num_tokens: int) -> Fraction:
        """What checkpoints are of all that a conversation of so many tokens keeps."""
        states = self.state_bytes * (ENDS + num_tokens // self.interval_tokens)
        return Fraction(states) / (states + self.token_bytes * num_tokens)
