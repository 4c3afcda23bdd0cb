"""Chooses which sequences of a step attend together, once per step on the host.

Takes page tables and lengths as numpy arrays. Gives groups whose members have the same number of
queries and a similar number of pages, so that one long sequence does not pad all others. With a
window, a group leaves out pages before its first visible key: another request may own them by now.
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
    """Limits of a group."""

    min_fill: float
    """A row joins a decode group only if it has at least this share of the longest row's pages."""
    max_tokens: int
    """Most tokens whose keys and values one group gathers: bounds the scratch memory."""


CPU_LIMITS = GroupingLimits(min_fill=0.75, max_tokens=1 << 14)

MIN_PIECE = 1024
"""With a window, the fewest queries for which pages are gathered at a time. Each gather includes
the window before these queries, so small gathers repeat much."""

MIN_SHARING_ROWS = 4
MIN_SHARED_PAGES = 4
"""Below these limits, attending to a common prefix once costs more than it saves."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Consecutive rows in decode order, with one query each."""

    start: int
    stop: int
    shared: Int64s
    """Pages at the start of all rows; all of them are full."""
    pages: Int64s
    """[stop - start, num_pages] after the shared pages. Entries past a row's own pages repeat the
    row's first entry."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Consecutive sequences with the same number of queries and the same context."""

    first_token: int
    num_seqs: int
    num_queries: int
    context_len: int
    """Counted from the first of `pages`: what the last query would see without a window."""
    pages: Int64s
    """[num_seqs, num_pages]"""


def rows_from(table: Int64s, firsts: Int64s, num_pages: Int64s) -> Int64s:
    """Each row's `num_pages` entries from `firsts` on, moved to the start of the row."""
    if not firsts.any():
        return table
    columns = firsts[:, None] + np.arange(num_pages.max())
    return np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1)


def decode_clusters(table: Int64s, num_pages: Int64s) -> list[Int64s]:
    """Two lists: rows that attend separately because they share their first pages, and all others.
    Both are sorted from most pages to fewest. Rows without pages are in neither."""
    live = np.flatnonzero(num_pages)
    clusters = _that_share(table, num_pages, live)
    if len(clusters) > 1 or (clusters and len(clusters[0]) < len(live)):
        rest = np.setdiff1d(live, np.concatenate(clusters), assume_unique=True)
        clusters.append(rest)
    else:
        clusters = [live]
    return [rows[np.argsort(-num_pages[rows], kind="stable")] for rows in clusters if len(rows)]


def _that_share(table: Int64s, num_pages: Int64s, live: Int64s) -> list[Int64s]:
    """A page always follows the same pages in any table, so one table is enough to compare."""
    long = live[num_pages[live] > MIN_SHARED_PAGES]
    if len(long) < MIN_SHARING_ROWS:
        return []
    pages = table[long, MIN_SHARED_PAGES - 1]
    _, which, counts = np.unique(pages, return_inverse=True, return_counts=True)
    return [long[which == place] for place in np.flatnonzero(counts >= MIN_SHARING_ROWS)]


def plan_decodes(
    table: Int64s,
    num_pages: Int64s,
    page_size: int,
    limits: GroupingLimits,
    is_cut: npt.NDArray[np.bool_] | None = None,
) -> Iterator[DecodePlan]:
    """Cut rows, sorted by falling `num_pages`, into groups. `is_cut` marks rows whose first page a
    window hides in part; these can share no page."""
    start = 0
    while start < len(num_pages):
        longest = int(num_pages[start])
        # The first row that would be padded too much. Negated, because searchsorted needs ascending
        # values.
        fits = int(np.searchsorted(-num_pages, -limits.min_fill * longest, side="right"))
        most = max(1, limits.max_tokens // (longest * page_size))
        stop = min(fits, start + most)
        rows = table[start:stop, :longest]
        may_share = is_cut is None or not is_cut[start:stop].any()
        num_shared = _num_shared(rows, int(num_pages[stop - 1])) if may_share else 0
        own = np.arange(num_shared, longest) < num_pages[start:stop, None]
        # Never another sequence's page: a NaN in it would spread even if masked.
        pages = np.where(own, rows[:, num_shared:], rows[:, num_shared : num_shared + 1])
        yield DecodePlan(start, stop, rows[0, :num_shared], pages)
        start = stop


def prefixes_together(
    plans: Sequence[DecodePlan], page_size: int, limits: GroupingLimits
) -> list[list[DecodePlan]]:
    """Merge neighbouring groups that share the same number of pages, each its own. A call costs
    more than a little padding."""
    together: list[list[DecodePlan]] = []
    for plan in plans:
        if together and _fit_together([*together[-1], plan], page_size, limits):
            together[-1].append(plan)
        else:
            together.append([plan])
    return together


def _fit_together(plans: Sequence[DecodePlan], page_size: int, limits: GroupingLimits) -> bool:
    num_shared = {len(plan.shared) for plan in plans}
    if len(num_shared) > 1 or 0 in num_shared:
        return False
    counts = [plan.stop - plan.start for plan in plans]
    longest = max(plan.pages.shape[1] for plan in plans)
    most = longest * sum(counts)
    used = sum(plan.pages.size for plan in plans)
    is_filled = used >= limits.min_fill * most
    is_even = sum(counts) >= limits.min_fill * max(counts) * len(counts)
    return is_filled and is_even and most * page_size <= limits.max_tokens


def _num_shared(rows: Int64s, fewest_pages: int) -> int:
    """The number of pages that all rows start with. A row's last page never counts, because it may
    not be full."""
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
    page_size: int,
    limits: GroupingLimits,
    window: int = 0,
) -> Iterator[PrefillPlan]:
    """Merge neighbours of the same shape. With a window, cut long sequences into pieces, so that a
    gather is never much larger than what its piece sees."""
    piece = max(MIN_PIECE, window)
    start, end = 0, len(context_lens)
    while start < end:
        num_queries = query_starts[start + 1] - query_starts[start]
        num_cached = context_lens[start] - num_queries
        is_long = window > 0 and num_queries > piece
        most = 1
        if not is_long:
            num_pages = -(-context_lens[start] // page_size)
            num_pages -= _first_page(num_cached, window, page_size)
            most = max(1, limits.max_tokens // (max(1, num_pages) * page_size))
        stop = start + 1
        while (
            stop < min(end, start + most)
            and context_lens[stop] == context_lens[start]
            and query_starts[stop + 1] - query_starts[stop] == num_queries
        ):
            stop += 1
        step = piece if is_long else max(1, num_queries)
        for first in range(0, num_queries, step):
            count = min(step, num_queries - first)
            visible = num_cached + first + count
            first_page = _first_page(num_cached + first, window, page_size)
            pages = table[start:stop, first_page : -(-visible // page_size)]
            seen = visible - first_page * page_size
            yield PrefillPlan(query_starts[start] + first, stop - start, count, seen, pages)
        start = stop


def _first_page(first_query: int, window: int, page_size: int) -> int:
    """The page of the first key that a query at this position sees."""
    return max(first_query + 1 - window, 0) // page_size if window else 0
