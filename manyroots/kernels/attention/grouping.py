"""Which sequences of a step attend together, decided once per step on the host.

Takes page tables and lengths as numpy arrays; gives groups whose members have the same number of
queries and a similar number of pages, so that one long sequence does not pad all the others.
Knows nothing of tensors, heads or layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupingLimits:
    """How far grouping goes on one kind of device."""

    min_fill: float
    """A row joins a decode group only if it has at least this share of the longest row's pages."""
    max_tokens: int
    """Most tokens whose keys and values one group gathers: bounds the scratch memory."""
    may_share: bool
    """Whether a group attends to a common prefix once. Only the CPU's attention also gives what
    merging two parts takes."""


CPU_LIMITS = GroupingLimits(min_fill=0.75, max_tokens=1 << 14, may_share=True)
GPU_LIMITS = GroupingLimits(min_fill=0.25, max_tokens=1 << 18, may_share=False)
"""A GPU pads almost for free, but each further group costs it a dozen launches per layer."""


MIN_SHARING_ROWS = 4
MIN_SHARED_PAGES = 4
"""Below these, attending to a common prefix once costs more than it saves."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Consecutive rows of the decode order, one query each."""

    start: int
    stop: int
    shared: Int64s
    """Pages that all rows begin with; all of them full."""
    pages: Int64s
    """[stop - start, num_pages] behind the shared ones; entries past a row's own repeat its first
    of these."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Consecutive sequences with the same number of queries and the same context."""

    first_token: int
    num_seqs: int
    num_queries: int
    context_len: int
    pages: Int64s
    """[num_seqs, num_pages]"""


def decode_order(num_pages: Int64s) -> Int64s | None:
    """Rows from the most pages to the fewest, or None where they already lie so."""
    if (num_pages[:-1] >= num_pages[1:]).all():
        return None
    return np.argsort(-num_pages, kind="stable")


def plan_decodes(
    table: Int64s, num_pages: Int64s, page_size: int, limits: GroupingLimits
) -> Iterator[DecodePlan]:
    """Cut rows, already sorted by falling `num_pages`, into groups."""
    start = 0
    while start < len(num_pages):
        longest = int(num_pages[start])
        # The first row that would be padded too much; negated because searchsorted wants rising.
        fits = int(np.searchsorted(-num_pages, -limits.min_fill * longest, side="right"))
        most = max(1, limits.max_tokens // (longest * page_size))
        stop = min(fits, start + most)
        rows = table[start:stop, :longest]
        num_shared = _num_shared(rows, int(num_pages[stop - 1])) if limits.may_share else 0
        own = np.arange(num_shared, longest) < num_pages[start:stop, None]
        # Never another sequence's page: masked or not, a NaN in it would spread.
        pages = np.where(own, rows[:, num_shared:], rows[:, num_shared : num_shared + 1])
        yield DecodePlan(start, stop, rows[0, :num_shared], pages)
        start = stop


def _num_shared(rows: Int64s, fewest_pages: int) -> int:
    """How many pages all rows begin with. A row's last page is never one: it may not be full."""
    most = fewest_pages - 1
    if len(rows) < MIN_SHARING_ROWS or most < MIN_SHARED_PAGES:
        return 0
    same = (rows[:, :most] == rows[0, :most]).all(axis=0)
    count = most if same.all() else int(np.argmin(same))
    return count if count >= MIN_SHARED_PAGES else 0


def plan_prefills(
    table: Int64s,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    first: int,
    page_size: int,
    limits: GroupingLimits,
) -> Iterator[PrefillPlan]:
    """Merge neighbours of the same shape, from sequence `first` on."""
    start, end = first, len(context_lens)
    while start < end:
        num_queries = query_starts[start + 1] - query_starts[start]
        context_len = context_lens[start]
        num_pages = -(-context_len // page_size)
        most = max(1, limits.max_tokens // (num_pages * page_size))
        stop = start + 1
        while (
            stop < min(end, start + most)
            and context_lens[stop] == context_len
            and query_starts[stop + 1] - query_starts[stop] == num_queries
        ):
            stop += 1
        pages = table[start:stop, :num_pages]
        yield PrefillPlan(query_starts[start], stop - start, num_queries, context_len, pages)
        start = stop
