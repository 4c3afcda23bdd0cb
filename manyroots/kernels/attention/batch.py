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
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.attention.grouping import (
    CPU_LIMITS,
    GPU_LIMITS,
    Int64s,
    decode_order,
    plan_decodes,
    plan_prefills,
)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows that are gathered and attend together."""

    rows: slice
    """Of the decode order."""
    shared_pages: Tensor
    """int64: full pages that all rows begin with, often none."""
    pages: Tensor
    """int64 [num_rows * num_pages] behind the shared ones."""
    bias: Tensor
    """[num_rows, 1, 1, num_keys]: 0 where a row sees the key, -inf where it does not."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Neighbouring sequences of one shape."""

    tokens: slice
    num_seqs: int
    num_queries: int
    context_len: int
    pages: Tensor
    """int64 [num_seqs * num_pages]"""


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
        """Work out the groups and move everything to `device` in a single copy."""
        table = page_table.astype(np.int64)
        starts = tuple(int(start) for start in query_starts)
        lens = tuple(int(length) for length in context_lens)
        limits = CPU_LIMITS if device.type == "cpu" else GPU_LIMITS

        decode_lens = np.asarray(lens[:num_decodes], dtype=np.int64)
        num_pages = -(-decode_lens // page_size)
        order = decode_order(num_pages)
        rows = np.arange(num_decodes) if order is None else order
        decodes = list(plan_decodes(table[rows], num_pages[rows], page_size, limits))
        prefills = list(plan_prefills(table, starts, lens, num_decodes, page_size, limits))

        moved = iter(
            _to_device(
                [
                    table,
                    slot_pages,
                    slot_offsets,
                    slot_pages[slot_offsets == 0],
                    rows,
                    decode_lens[rows],
                    *(pages for plan in decodes for pages in (plan.shared, plan.pages)),
                    *(plan.pages for plan in prefills),
                ],
                device,
            )
        )
        table_on_device, pages, offsets, new_pages, rows_on_device, sorted_lens = (
            next(moved) for _ in range(6)
        )
        return cls(
            page_table=table_on_device.view(table.shape),
            slot_pages=pages,
            slot_offsets=offsets,
            query_starts=starts,
            context_lens=lens,
            num_decodes=num_decodes,
            new_pages=new_pages,
            decode_order=None if order is None else rows_on_device,
            decode_groups=tuple(
                DecodeGroup(
                    rows=slice(plan.start, plan.stop),
                    shared_pages=next(moved),
                    pages=next(moved),
                    bias=_length_bias(
                        sorted_lens[plan.start : plan.stop] - len(plan.shared) * page_size,
                        plan.pages.shape[1] * page_size,
                        dtype,
                    ),
                )
                for plan in decodes
            ),
            prefill_groups=tuple(
                PrefillGroup(
                    tokens=slice(
                        plan.first_token, plan.first_token + plan.num_seqs * plan.num_queries
                    ),
                    num_seqs=plan.num_seqs,
                    num_queries=plan.num_queries,
                    context_len=plan.context_len,
                    pages=next(moved),
                )
                for plan in prefills
            ),
        )


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """All arrays as flat int64 tensors; one copy, because each costs a GPU a round trip."""
    flat: list[Int64s] = [array.reshape(-1).astype(np.int64) for array in arrays]
    packed = torch.from_numpy(np.concatenate(flat)).to(device)
    return torch.split(packed, [len(array) for array in flat])


def _length_bias(lens: Tensor, num_keys: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.arange(num_keys, device=lens.device) >= lens[:, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=lens.device)
    return bias.masked_fill_(hidden, float("-inf"))[:, None, None, :]
