"""The share of states in a memory that they share with pages (F09).

In: the bytes of a state and of a page of all layers, and assumptions about requests. Out: bytes for
pages, and the number of states for this many pages.

Working states come first: one for each sequence that may run. The rest is divided between pages and
checkpoints by what a conversation keeps: all pages, and checkpoints at each interval and at the end
of its prompt and of its output. This share depends on its length. As between families of pages,
each gets memory in proportion to its largest share at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from manyroots.cache.split import SHORT

ENDS = 2
"""Checkpoints of a conversation besides those by interval: after its prompt and after its
output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShare:
    """The number of states beside this many bytes of pages."""

    state_bytes: int
    """Bytes of one state of every family that has states."""
    token_bytes: Fraction
    """Bytes of a token's keys and values in all layers."""
    num_working: int
    interval_tokens: int
    checkpoint_bytes: int | None
    """None: computed from what conversations keep."""

    @property
    def working_bytes(self) -> int:
        return self.num_working * self.state_bytes

    def pages_bytes(self, num_bytes: int, max_model_len: int) -> int:
        """Bytes of `num_bytes` for pages; negative if the states do not fit."""
        rest = num_bytes - self.working_bytes
        if self.checkpoint_bytes is not None:
            return rest - self.checkpoint_bytes
        return int(rest / (1 + self._per_page_byte(max_model_len)))

    def num_states(self, pages_bytes: int, max_model_len: int) -> int:
        """Working states and checkpoints beside pages of this many bytes."""
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
        """The share of checkpoints in everything that a conversation of this length keeps."""
        states = self.state_bytes * (ENDS + num_tokens // self.interval_tokens)
        return Fraction(states) / (states + self.token_bytes * num_tokens)
