"""One step as the layers of one family see it: tensors on the device, nothing grouped.

`AttentionMetadata` describes a step to attention, once per family of layers that share a page table
and a window. Each set of kernels prepares it in its own way. `PreparedAttention` is the form that
the reference and Triton use. Nothing in it depends on the values of lengths, so one captured graph
serves any lengths.

Sequences follow each other. Sequences that decode, with one query each, come first:

    tokens            | d0 | d1 | d2 | p0 ........ | p1 .... |
    num_decodes = 3
    query_starts                     3             12        16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyroots.kernels.qk_rope_kv_write.inputs import SlotMapping

MANY_DECODES = 64
"""With more rows than this, decoding rows start longest first."""
QUERY_BLOCK = 128
MEMBERS = 16
"""Most rows of a group that read a shared prefix together."""
MAX_RUN = 8
"""Most tokens of a run."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Rows that start with the same full pages, so that a kernel can read these pages once for all
    of them. This only affects how results are computed: a kernel may ignore it. Made by
    `sharing.py`."""

    lens: Tensor
    """int32 [num_rows]: shared tokens at the start of a row; 0 for none."""
    members: Tensor
    """int32 [num_rows]: rows, one group after the other."""
    blocks: Tensor
    """int32 [max_blocks, 3]: index of the first of `members`, their number, and the tokens that
    they share. Unused blocks have no members. A block has at most MEMBERS members of one group."""


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Consecutive rows whose tokens belong to one sequence, so that a kernel can read its history
    once for all of them. This only affects how results are computed: a kernel may ignore
    it. Every row belongs to one run; a row alone is a run. Within a run the page tables are equal
    and `context_lens` never decrease."""

    starts: Tensor
    """int32 [max_runs + 1]: the first row of each run, and the end. A run has at most MAX_RUN
    rows. Entries after the end have no meaning."""
    count: Tensor
    """int32 [1]: the number of runs."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The tokens that each sequence of a step sees through one family's page table, and where it
    writes the keys and values of new tokens."""

    page_table: Tensor
    """int32 [num_seqs, max_pages]. With a window, entries before the window may name another
    request's page, or no page."""
    context_lens: Tensor
    """int32 [num_seqs]: tokens that a sequence's last query would see without a window, including
    its own; 0 for a padding row."""
    num_decodes: int
    """This many sequences, the first ones, have one query each."""
    query_starts: Tensor | None
    """int32 [num_seqs - num_decodes + 1]: the first token of each remaining sequence, and the end.
    None if all decode."""
    blocks: Tensor | None
    """int32 [num_blocks, 2] as `query_blocks` gives them; None if all decode."""
    slot_mapping: SlotMapping
    """Page slots of all tokens."""
    window: int = 0
    """A query sees this many last tokens, including its own; 0: all."""
    shared: SharedPrefixes | None = None
    """Prefixes shared by decoding rows; None with a window."""
    runs: TokenRuns | None = None
    """Decoding rows that belong to one sequence; None if `shared` is given, or if no sequence has
    two rows."""
    order: Tensor | None = None
    """int32 [num_decodes]: the order in which decoding rows start; None: the given order. It
    affects time only: with many rows, the longest should not start last."""
    is_padded: bool = False
    """Whether tokens may belong to no sequence. `num_decodes` then also counts rows without
    context, and other sequences' tokens may have their positions."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one query each."""

    page_table: Tensor
    """int32 [num_rows, max_pages]"""
    context_lens: Tensor
    """int32 [num_rows]: tokens that a row sees, including its own; 0 for a padding row."""
    shared: SharedPrefixes | None = None
    order: Tensor | None = None
    runs: TokenRuns | None = None


@dataclass(frozen=True, slots=True)
class PrefillSegments:
    """Sequences with any number of queries; their tokens follow each other."""

    page_table: Tensor
    """int32 [num_seqs, max_pages]"""
    query_starts: Tensor
    """int32 [num_seqs + 1]: offsets into the queries."""
    context_lens: Tensor
    """int32 [num_seqs]: tokens that a sequence's last query sees."""
    query_blocks: Tensor
    """int32 [num_blocks, 2]: sequence, and its first query in this block of QUERY_BLOCK."""


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """`AttentionMetadata`, split once per step into decoding and other sequences."""

    slot_mapping: SlotMapping
    num_decodes: int
    decodes: DecodeRows | None
    prompts: PrefillSegments | None
    window: int
    is_padded: bool


def prepare(rows: AttentionMetadata, page_size: int, dtype: torch.dtype) -> PreparedAttention:
    """Prepare what no layer changes, once per family and step."""
    count, table, lens = rows.num_decodes, rows.page_table, rows.context_lens
    decodes = None
    if count:
        decodes = DecodeRows(table[:count], lens[:count], rows.shared, rows.order, rows.runs)
    prompts = None
    if rows.query_starts is not None and rows.blocks is not None and count < table.shape[0]:
        prompts = PrefillSegments(table[count:], rows.query_starts, lens[count:], rows.blocks)
    return PreparedAttention(
        rows.slot_mapping, count, decodes, prompts, rows.window, rows.is_padded
    )


def query_blocks(query_starts: Sequence[int], context_lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """Cut every sequence's queries into blocks of QUERY_BLOCK: int32 [num_blocks, 2], the sequence
    and its first query in the block. The longest contexts come first."""
    counts = np.diff(np.asarray(query_starts))
    num_blocks = -(-counts // QUERY_BLOCK)
    seqs = np.repeat(np.arange(len(counts)), num_blocks)
    before = np.cumsum(num_blocks) - num_blocks
    firsts = (np.arange(len(seqs)) - before[seqs]) * QUERY_BLOCK
    seen = np.asarray(context_lens)[seqs] - counts[seqs] + firsts
    order = np.argsort(-seen, kind="stable")
    return np.stack((seqs[order], firsts[order]), axis=1).astype(np.int32)


def token_runs(
    rows: npt.NDArray[np.integer[Any]], context_lens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], int]:
    """`TokenRuns` of single tokens: the starts of as many runs as there can be, and the number of
    runs. `rows`: the sequence of each token."""
    num_rows = len(rows)
    starts = np.zeros(num_rows + 1, np.int32)
    follows = (rows[1:] == rows[:-1]) & (context_lens[1:] >= context_lens[:-1])
    at = np.arange(num_rows)
    # Of each token, the first token of its sequence's stretch.
    firsts = np.maximum.accumulate(np.where(np.append(False, follows), 0, at))
    begins = np.flatnonzero((at - firsts) % MAX_RUN == 0)
    starts[: len(begins)] = begins
    starts[len(begins) :] = num_rows
    return starts, len(begins)


def longest_first(context_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
    """`AttentionMetadata.order` for decoding rows: the longest should not start last. None if there
    are few."""
    if len(context_lens) <= MANY_DECODES:
        return None
    return np.argsort(-context_lens, kind="stable").astype(np.int32)
