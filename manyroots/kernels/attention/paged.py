"""One step as the Triton attention kernels see it: tensors on the device, nothing grouped.

Takes lengths and page tables; gives them to every layer. `DecodeRows` has nothing that depends on
the lengths' values, so that a captured graph serves any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one query each."""

    page_table: Tensor
    """int32 [num_rows, max_pages]"""
    context_lens: Tensor
    """int32 [num_rows]: tokens a row sees, its own included; 0 for a row that only pads."""


@dataclass(frozen=True, slots=True)
class PrefillSegments:
    """Sequences with any number of queries; their tokens lie one after the other."""

    page_table: Tensor
    """int32 [num_seqs, max_pages]"""
    query_starts: Tensor
    """int32 [num_seqs + 1]"""
    context_lens: Tensor
    """int32 [num_seqs]: tokens a sequence's last query sees."""
    query_blocks: Tensor
    """int32 [num_blocks, 2]: sequence, and its first query in this block of QUERY_BLOCK."""

    @classmethod
    def build(
        cls,
        page_table: Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
    ) -> PrefillSegments:
        """Cut every sequence's queries into blocks; the longest contexts come first."""
        counts = np.diff(np.asarray(query_starts))
        blocks = [
            (seq, first)
            for seq, count in enumerate(counts)
            for first in range(0, count, QUERY_BLOCK)
        ]
        blocks.sort(key=lambda block: counts[block[0]] - context_lens[block[0]] - block[1])

        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(page_table, ints(list(query_starts)), ints(list(context_lens)), ints(blocks))
