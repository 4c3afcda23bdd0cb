"""One step as torch's attention sees it, planned on the host once per family and step.

Takes `AttentionMetadata` whose tensors are on a CPU; gives the gathers and masks, in groups, that
every layer of the family uses. Knows nothing of requests, heads or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from manyroots.kernels.attention.grouping import (
    CPU_LIMITS,
    DecodePlan,
    Int64s,
    decode_clusters,
    plan_decodes,
    plan_prefills,
    prefixes_together,
    rows_from,
)
from manyroots.kernels.attention.paged import AttentionMetadata
from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping

SEEN, HIDDEN = np.float32(0), np.float32(-np.inf)
"""Added to a score: SEEN to a visible one, HIDDEN to a masked one."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows that are gathered and attend together."""

    rows: slice
    """Positions in decode order."""
    shared_pages: Tensor
    """int64 [num_prefixes * num_shared]: full pages at the start of the rows, often none."""
    num_prefixes: int
    """Rows are ordered by prefix."""
    cells: Tensor | None
    """int64 [num_prefixes * most rows of a prefix]: rows ordered by prefix, padded with rows of the
    same prefix. None if all prefixes have equally many rows."""
    places: Tensor | None
    """int64: indexes of the cells that are not padding."""
    pages: Tensor
    """int64 [num_rows * num_pages] after the shared pages."""
    bias: Tensor
    """[num_rows, 1, 1, num_keys]: 0 where a row sees the key, -inf where it does not."""


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """Neighbouring sequences of one shape, or a piece of a long one."""

    tokens: slice
    num_seqs: int
    num_queries: int
    context_len: int
    """Counted from the first of `pages`: what the last query would see without a window."""
    pages: Tensor
    """int64 [num_seqs * num_pages]"""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """`AttentionMetadata`, in groups that attend together."""

    slot_mapping: SlotMapping
    num_decodes: int
    decode_order: Tensor | None
    """int64: decoding rows ordered by prefix and from long to short, without padding rows. None if
    they are already in this order."""
    decode_groups: tuple[DecodeGroup, ...]
    prefill_groups: tuple[PrefillGroup, ...]
    window: int


def group_rows(rows: AttentionMetadata, page_size: int, dtype: torch.dtype) -> GroupedRows:
    """Prepare what no layer changes; `dtype` is that of the queries."""
    table, lens = _int64s(rows.page_table), _int64s(rows.context_lens)
    count = rows.num_decodes
    order, decodes = _group_decodes(table[:count], lens[:count], rows.window, page_size, dtype)
    prefills: tuple[PrefillGroup, ...] = ()
    if rows.query_starts is not None:
        plans = plan_prefills(
            table[count:], rows.query_starts.tolist(), lens[count:].tolist(), page_size,
            CPU_LIMITS, rows.window,
        )  # fmt: skip
        prefills = tuple(
            PrefillGroup(
                tokens=slice(plan.first_token, plan.first_token + plan.num_seqs * plan.num_queries),
                num_seqs=plan.num_seqs,
                num_queries=plan.num_queries,
                context_len=plan.context_len,
                pages=_indices(plan.pages),
            )
            for plan in plans
        )
    return GroupedRows(
        _slot_mapping(rows.slot_mapping), count, order, decodes, prefills, rows.window
    )


def _group_decodes(
    table: Int64s,
    lens: Int64s,
    window: int,
    page_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, tuple[DecodeGroup, ...]]:
    begins = np.maximum(lens - window, 0) if window else np.zeros_like(lens)
    firsts = begins // page_size
    num_pages = -(-lens // page_size) - firsts
    if not num_pages.any():
        return (torch.zeros(0, dtype=torch.int64) if len(lens) else None), ()
    own_table = rows_from(table, firsts, num_pages)
    begins, ends = begins - firsts * page_size, lens - firsts * page_size
    clusters, plans = decode_clusters(own_table, num_pages), []
    at = 0
    for rows in clusters:
        is_cut = begins[rows] > 0 if window else None
        own = plan_decodes(own_table[rows], num_pages[rows], page_size, CPU_LIMITS, is_cut)
        plans += [replace(plan, start=at + plan.start, stop=at + plan.stop) for plan in own]
        at += len(rows)
    order = np.concatenate(clusters)
    begins, ends = begins[order], ends[order]
    groups = tuple(
        _group(some, begins if window else None, ends, page_size, dtype)
        for some in prefixes_together(plans, page_size, CPU_LIMITS)
    )
    is_whole = np.array_equal(order, np.arange(len(lens)))
    return None if is_whole else torch.from_numpy(order), groups


def _group(
    plans: Sequence[DecodePlan],
    begins: Int64s | None,
    ends: Int64s,
    page_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    """Takes plans that attend together; `begins` and `ends` count in decode order."""
    rows = slice(plans[0].start, plans[-1].stop)
    shared = np.stack([plan.shared for plan in plans])
    longest = max(plan.pages.shape[1] for plan in plans)
    pages = np.concatenate([_padded(plan.pages, longest) for plan in plans])
    counts = np.array([plan.stop - plan.start for plan in plans])
    cells = places = None
    if (counts != counts[0]).any():
        offsets = np.arange(counts.max())
        starts = np.cumsum(counts) - counts
        is_real = offsets < counts[:, None]
        cells = torch.from_numpy(np.where(is_real, starts[:, None] + offsets, starts[:, None]))
        cells, places = cells.flatten(), torch.from_numpy(np.flatnonzero(is_real))
    return DecodeGroup(
        rows=rows,
        shared_pages=_indices(shared),
        num_prefixes=len(plans),
        cells=cells,
        places=places,
        pages=_indices(pages),
        bias=_bias(
            None if begins is None else begins[rows],
            ends[rows] - shared.shape[1] * page_size,
            longest * page_size,
            dtype,
        ),
    )


def _padded(pages: Int64s, longest: int) -> Int64s:
    """Pads with each row's own first page."""
    more = longest - pages.shape[1]
    return np.concatenate((pages, np.repeat(pages[:, :1], more, axis=1)), axis=1)


def _bias(begins: Int64s | None, ends: Int64s, num_keys: int, dtype: torch.dtype) -> Tensor:
    """0 for the keys [begin, end) of each row, -inf for others. None if all begin with the first
    key."""
    keys = np.arange(num_keys)
    is_seen = keys < ends[:, None]
    if begins is not None:
        is_seen &= keys >= begins[:, None]
    bias = torch.from_numpy(np.where(is_seen, SEEN, HIDDEN))
    return bias.to(dtype)[:, None, None, :]


def _slot_mapping(slot_mapping: SlotMapping) -> SlotMapping:
    pages, offsets = (_int64s(tensor) for tensor in (slot_mapping.pages, slot_mapping.offsets))
    tokens = None
    if pages.min(initial=0) < 0:
        kept = np.flatnonzero(pages >= 0)
        tokens, pages, offsets = torch.from_numpy(kept), pages[kept], offsets[kept]
    new_pages = torch.from_numpy(pages[offsets == 0])
    return SlotMapping(torch.from_numpy(pages), torch.from_numpy(offsets), new_pages, tokens)


def _int64s(tensor: Tensor) -> Int64s:
    return tensor.numpy().astype(np.int64)


def _indices(pages: Int64s) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pages).reshape(-1))
