"""Finds rows of a step that start with the same pages, once per step on the host.

Takes page tables and lengths as numpy arrays. Gives groups, and the arrays with which a kernel
reads a group's shared pages once for all of its rows. Equal pages imply equal tokens before them,
whichever request wrote them. Knows nothing of tensors, requests or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manyroots.kernels.attention.paged import MEMBERS

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MIN_ROWS = 4
MIN_PAGES = 4
"""Below these limits, reading a prefix once for several rows costs more than it saves."""
MIN_SAVED_TOKENS = 8192
MIN_SAVED_SHARE = 0.2
"""Share of all tokens that the rows see. Below it, a second launch and the merge cost more than
they save."""
MAX_DEPTH = 8
"""How often a group is split into groups that share more; bounds the time."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows that begin with the same pages."""

    members: Int64s
    num_pages: int

    @property
    def num_saved(self) -> int:
        """Pages that are not read again."""
        return (len(self.members) - 1) * self.num_pages


def shared_groups(table: Int32s, rows: Int32s, lens: Int64s, page_size: int) -> list[PrefixGroup]:
    """Disjoint groups that save enough; none if it is not worthwhile. `table` is [any rows, pages].
    Members are indexes into `rows`, whose sequences see `lens` tokens and always have some unshared
    tokens."""
    most = (lens - 1) // page_size
    long = np.flatnonzero(most >= MIN_PAGES)
    if len(long) < MIN_ROWS:
        return []
    groups = [
        group
        for members in _alike(long, table[rows[long], 0])
        for group in _best(table, rows, most, members, MAX_DEPTH)
    ]
    saved = sum(group.num_saved for group in groups) * page_size
    is_worth_it = saved >= max(MIN_SAVED_TOKENS, MIN_SAVED_SHARE * lens.sum())
    return groups if is_worth_it else []


def _best(
    table: Int32s, rows: Int32s, most: Int64s, members: Int64s, depth: int
) -> list[PrefixGroup]:
    """Split members that have the first page in common into one group, or several that share
    more."""
    limit = int(most[members].min())
    tables = table[rows[members], :limit]
    same = (tables == tables[0]).all(axis=0)
    common = limit if same.all() else int(np.argmin(same))
    whole = [PrefixGroup(members, common)] if common >= MIN_PAGES else []
    if depth == 0:
        return whole
    longer = members[most[members] > common]
    parts = [
        group
        for some in _alike(longer, table[rows[longer], common])
        for group in _best(table, rows, most, some, depth - 1)
    ]
    return max(whole, parts, key=lambda groups: sum(group.num_saved for group in groups))


def _alike(members: Int64s, pages: Int32s) -> list[Int64s]:
    """The members of each page that enough rows have."""
    order = np.argsort(pages, kind="stable")
    changes = np.flatnonzero(np.diff(pages[order])) + 1
    bounds = np.concatenate(([0], changes, [len(order)]))
    begins = np.flatnonzero(np.diff(bounds) >= MIN_ROWS).tolist()
    return [members[order[bounds[i] : bounds[i + 1]]] for i in begins]


def most_blocks(num_rows: int) -> int:
    """The most blocks that groups of this many rows need: every block but a group's last is
    full."""
    return max(1, num_rows // MIN_ROWS)


def shared_arrays(
    groups: Sequence[PrefixGroup], num_rows: int, page_size: int
) -> tuple[Int32s, Int32s, Int32s]:
    """`lens`, `members` and `blocks` of `SharedPrefixes`; unused entries are zero."""
    lens, members = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    blocks = np.zeros((most_blocks(num_rows), 3), np.int32)
    at = block = 0
    for group in groups:
        count, num_tokens = len(group.members), group.num_pages * page_size
        lens[group.members] = num_tokens
        members[at : at + count] = group.members
        for first in range(0, count, MEMBERS):
            blocks[block] = at + first, min(MEMBERS, count - first), num_tokens
            block += 1
        at += count
    return lens, members, blocks
