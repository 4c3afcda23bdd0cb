"""One step as the attention kernels see it.

Takes page tables and lengths from the runner, once per step; gives the same `AttentionBatch` to
every layer, with everything that does not depend on the layer already worked out. Knows nothing
of requests, heads or models.

Sequences lie one after the other. Those with exactly one query that only decode come first:

    tokens     | d0 | d1 | d2 | s3 ........ | s4 .... |
    query_starts 0    1    2    3             9         13
    num_decodes = 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.attention.grouping import CPU_LIMITS, GPU_LIMITS
from manyroots.kernels.attention.groups import DecodeGroup, GroupedRows, PrefillGroup, group_rows
from manyroots.kernels.attention.paged import PagedRows
from manyroots.kernels.rope_write.inputs import KvPlaces


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where this step's keys and values go, and what each query sees."""

    page_table: Tensor
    """int64 [num_seqs, max_pages], padded with 0."""
    slot_pages: Tensor
    """int64 [num_tokens]: the page each token's keys and values are written to."""
    slot_offsets: Tensor
    """int64 [num_tokens]: the place within that page."""
    query_starts: tuple[int, ...]
    """num_seqs + 1 offsets into the tokens."""
    context_lens: tuple[int, ...]
    """Tokens that a sequence's last query sees: those computed before and this step's."""
    num_decodes: int
    """Sequences [0, num_decodes) have one query each and come first."""

    new_pages: Tensor
    """int64: pages whose first token this step writes; what lay in them is another's."""
    decode_order: Tensor | None
    """int64 [num_decodes]: decoding rows from long to short; None where they already lie so."""
    decode_groups: tuple[DecodeGroup, ...]
    prefill_groups: tuple[PrefillGroup, ...]

    @classmethod
    def build(
        cls,
        *,
        page_table: np.ndarray,
        slot_pages: np.ndarray,
        slot_offsets: np.ndarray,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        num_decodes: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionBatch:
        """Work out the groups and move everything to `device`."""
        starts = tuple(int(start) for start in query_starts)
        lens = tuple(int(length) for length in context_lens)
        limits = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS
        pages, offsets = (
            torch.from_numpy(array.astype(np.int64)) for array in (slot_pages, slot_offsets)
        )
        rows = PagedRows(
            page_table=torch.from_numpy(page_table.astype(np.int64)),
            context_lens=torch.tensor(lens),
            num_decodes=num_decodes,
            query_starts=torch.tensor(starts[num_decodes:]) - num_decodes,
            blocks=None,
            places=KvPlaces(pages, offsets),
        )
        grouped = group_rows(rows, page_size, dtype, limits)
        return cls(
            page_table=rows.page_table.to(device),
            slot_pages=pages.to(device),
            slot_offsets=offsets.to(device),
            query_starts=starts,
            context_lens=lens,
            num_decodes=num_decodes,
            new_pages=pages[offsets == 0].to(device),
            decode_order=None if grouped.decode_order is None else grouped.decode_order.to(device),
            decode_groups=tuple(
                DecodeGroup(
                    group.rows,
                    group.shared_pages.to(device),
                    group.pages.to(device),
                    group.bias.to(device),
                )
                for group in grouped.decode_groups
            ),
            prefill_groups=tuple(
                replace(group, pages=group.pages.to(device)) for group in grouped.prefill_groups
            ),
        )

    @property
    def grouped(self) -> GroupedRows:
        """For kernels that are told of windows."""
        places = KvPlaces(self.slot_pages, self.slot_offsets, self.new_pages)
        return GroupedRows(
            places, self.num_decodes, self.decode_order, self.decode_groups, self.prefill_groups, 0
        )
