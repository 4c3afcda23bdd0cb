"""Where the adapters of experts lie on the device, and which tokens want which.

Next to `lora_sites/sites.py`: the same pool, with one matrix for each expert or one for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PART_WIDTH = 5


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One product of all experts of a layer: gate and up, or down."""

    pool: Tensor
    """[num_elements] of the model's dtype; every offset is a multiple of 8."""
    table: Tensor
    """int64 [num_slots, PART_WIDTH * num_parts]: for each part the offset of A [rank, in] of the
    first expert, the distance to the next expert's (0: all share it), the rank, and the same two
    of B [part size, rank]. A slot that does not change a part has rank 0."""
    scalings: Tensor
    """float32 [num_slots, num_parts]"""
    part_sizes: tuple[int, ...]
    max_rank: int
    """The largest rank that a part of any slot may have."""

    @property
    def num_parts(self) -> int:
        return len(self.part_sizes)

    @property
    def width(self) -> int:
        """Columns of a pair's shrunk activations: `max_rank` for each part."""
        return self.num_parts * self.max_rank


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of one layer's experts in one step."""

    gate_up: ExpertSite
    down: ExpertSite
    slots: Tensor
    """int32 [num_tokens]; negative for tokens of the base model."""
