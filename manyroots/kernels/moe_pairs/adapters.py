"""Where adapters' weights for a layer's experts lie on the device, and which rows want which.

Takes and holds tensors; computes nothing. As in `lora_sites`, all weights lie in one flat pool and
a site's table says where, so that loading an adapter changes no captured graph. What all experts
of an adapter share is one matrix in the pool, and the way from one expert to the next is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ENTRIES_PER_PART = 6


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One product of a layer's experts: its parts, and where each slot's weights for it begin."""

    pool: Tensor
    """[num_elements] of the model's dtype; every offset is a multiple of 8."""
    table: Tensor
    """int64 [num_slots, 1 + 6 * num_parts]: the sum of ranks; then for each part where its ranks
    begin among them, its rank, the offset of its A [rank, in] for expert 0, how far on the next
    expert's is (0: shared by all), and the same two for its B [part size, rank]. A slot that does
    not change a part has rank 0 there; ranks are multiples of 8."""
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
        """Columns of a pair's shrunk activations: enough for any slot."""
        return self.num_parts * self.max_rank


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """What adapters change of one layer's experts in one step."""

    gate_up: ExpertSite
    """Two parts, gates first."""
    down: ExpertSite
    slots: Tensor
    """int32 [num_tokens]: the slot that each token wants, -1 for the base model."""
