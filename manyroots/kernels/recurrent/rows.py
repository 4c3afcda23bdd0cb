"""One step for the recurrent layers of a family: each sequence's state and tokens.

Made once per step by a kernel set's `recurrent.prepare`; read by every kernel with a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step, decoding ones first, with one token each."""

    units: Tensor
    """int64 [num_seqs]: the unit of each sequence's state, which is read and written in place.
    Padding rows use the spare unit, which may occur many times."""
    starts: Tensor
    """int32 [num_seqs + 1]: sequence i has the flat tokens [starts[i], starts[i + 1])."""
    num_decodes: int
    is_fresh: Tensor
    """bool [num_seqs]: the sequence starts here, so its state counts as zeros, whatever the unit
    holds."""
    max_len: int
    """The most tokens of one sequence in this step, known on the host."""

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has a single token."""
        return self.num_decodes == len(self.units)
