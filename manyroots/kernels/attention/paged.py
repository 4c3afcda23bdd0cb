"""One step as the layers of one family see it: tensors on the device, nothing grouped.

`AttentionMetadata` is what attention is told of a step, once per family of layers that share a page
table and a window; each set of kernels prepares it in its own way. `PreparedAttention` is what the
reference and Triton make of it: nothing in it depends on the lengths' values, so that a captured
graph serves any of them.

Sequences lie one after the other, those with one query that only decode first:

    tokens            | d0 | d1 | d2 | p0 ........ | p1 .... |
    num_decodes = 3
    query_starts                     3             12        16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping

MANY_DECODES = 64
"""Beyond, rows that decode begin longest first."""
QUERY_BLOCK = 128
MEMBERS = 16
"""Most rows of a group that read what they share together."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which rows begin with the same full pages, so that those are read once for all of them. Says
    how to compute, not what: a kernel may ignore it. Made by `sharing.py`."""

    lens: Tensor
    """int32 [num_rows]: tokens at a row's beginning that it shares; 0 for none."""
    members: Tensor
    """int32 [num_rows]: rows, one group behind the other."""
    blocks: Tensor
    """int32 [max_blocks, 3]: the first of `members`, how many, and the tokens that they share; none
    where a block is not used. At most MEMBERS of a group."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What each sequence of a step sees through one family's page table, and where its tokens'
    keys and values go."""

    page_table: Tensor
    """int32 [num_seqs, max_pages]. With a window, entries of pages that lie wholly in front of it
    may be anybody's, or no page at all."""
    context_lens: Tensor
    """int32 [num_seqs]: tokens a sequence's last query sees without a window, its own included; 0
    for a row that only pads."""
    num_decodes: int
    """The first so many sequences have one query each."""
    query_starts: Tensor | None
    """int32 [num_seqs - num_decodes + 1]: the first token of each of the others, and the end; None
    if all decode."""
    blocks: Tensor | None
    """int32 [num_blocks, 2] as `query_blocks` gives them; None if all decode."""
    slot_mapping: SlotMapping
    """Of all tokens."""
    window: int = 0
    """A query sees the last so many tokens, its own included; 0: all."""
    shared: SharedPrefixes | None = None
    """Among those that decode; None with a window."""
    order: Tensor | None = None
    """int32 [num_decodes]: rows that decode, in the order to begin them; None: as they come. Says
    when, not what: where rows are many, the longest should not come last."""
    is_padded: bool = False
    """Whether tokens may be nobody's. `num_decodes` then counts rows without context, too, whose
    place other sequences' tokens may have."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one query each."""

    page_table: Tensor
    """int32 [num_rows, max_pages]"""
    context_lens: Tensor
    """int32 [num_rows]: tokens a row sees, its own included; 0 for a row that only pads."""
    shared: SharedPrefixes | None = None
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillSegments:
    """Sequences with any number of queries; their tokens lie one after the other."""

    page_table: Tensor
    """int32 [num_seqs, max_pages]"""
    query_starts: Tensor
    """int32 [num_seqs + 1]: places among the queries."""
    context_lens: Tensor
    """int32 [num_seqs]: tokens a sequence's last query sees."""
    query_blocks: Tensor
    """int32 [num_blocks, 2]: sequence, and its first query in this block of QUERY_BLOCK."""


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """`AttentionMetadata`, cut once per step into what decodes and what does not."""

    slot_mapping: SlotMapping
    num_decodes: int
    decodes: DecodeRows | None
    prompts: PrefillSegments | None
    window: int
    is_padded: bool


def prepare(rows: AttentionMetadata, page_size: int, dtype: torch.dtype) -> PreparedAttention:
    """What depends on no layer; once per family and step."""
    count, table, lens = rows.num_decodes, rows.page_table, rows.context_lens
    decodes = None
    if count:
        decodes = DecodeRows(table[:count], lens[:count], rows.shared, rows.order)
    prompts = None
    if rows.query_starts is not None and rows.blocks is not None and count < table.shape[0]:
        prompts = PrefillSegments(table[count:], rows.query_starts, lens[count:], rows.blocks)
    return PreparedAttention(
        rows.slot_mapping, count, decodes, prompts, rows.window, rows.is_padded
    )


def query_blocks(query_starts: Sequence[int], context_lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Every sequence's queries cut into blocks of QUERY_BLOCK: int32 [num_blocks, 2], the sequence
    and its first query in the block. The longest contexts come first."""
    counts = np.diff(np.asarray(query_starts))
    num_blocks = -(-counts // QUERY_BLOCK)
    seqs = np.repeat(np.arange(len(counts)), num_blocks)
    before = np.cumsum(num_blocks) - num_blocks
    firsts = (np.arange(len(seqs)) - before[seqs]) * QUERY_BLOCK
    seen = np.asarray(context_lens)[seqs] - counts[seqs] + firsts
    order = np.argsort(-seen, kind="stable")
    return np.stack((seqs[order], firsts[order]), axis=1).astype(np.int32)


def longest_first(context_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
    """`AttentionMetadata.order` of rows that decode: the longest should not come last.
    None where they are few."""
    if len(context_lens) <= MANY_DECODES:
        return None
    return np.argsort(-context_lens, kind="stable").astype(np.int32)
