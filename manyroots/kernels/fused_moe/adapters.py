"""Device addresses of the adapters of experts, and each token's adapter.

Complements `lora_ops/sites.py`: the same pool, with one matrix per expert or one for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyroots.kernels.lora_ops.sites import LinearSite, LoraRows, PoolSite

PART_WIDTH = 5


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSite(PoolSite):
    """One product of all experts of a layer: gate and up, or down. `table` has PART_WIDTH columns
    for each part: the offset of A [rank, in] of the first expert, the distance to the next
    expert's (0: all share it), the rank, and the same two of B [part size, rank]."""


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of one layer's experts in one step."""

    gate_up: ExpertSite
    down: ExpertSite
    rows: LoraRows
    """The slot of each token; a pair has its token's adapter."""
    shared: tuple[LinearSite, LinearSite] | None = None
    """The two products of a block that all tokens go through, in the same pool, if it is computed
    together with experts."""
