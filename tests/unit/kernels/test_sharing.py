"""Which rows begin with the same pages, against a naive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from manyroots.kernels.attention import sharing
from manyroots.kernels.attention.paged import MEMBERS
from manyroots.kernels.attention.sharing import (
    PrefixGroup,
    most_blocks,
    shared_arrays,
    shared_groups,
)

PAGE = 4
ROWS = np.arange(8)


def random_rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows that grow from one another, as conversations do: some share nothing, some all but the
    end."""
    pages = itertools.count(1)
    tables: list[list[int]] = []
    for _ in range(int(rng.integers(1, 40))):
        own: list[int] = []
        if tables and rng.random() < 0.8:
            parent = tables[int(rng.integers(len(tables)))]
            own = parent[: int(rng.integers(0, len(parent) + 1))]
        tables.append([*own, *itertools.islice(pages, int(rng.integers(1, 12)))])
    table = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, own in enumerate(tables):
        table[row, : len(own)] = own
    lens = np.array([PAGE * len(own) - int(rng.integers(0, PAGE)) for own in tables])
    return table, lens


@pytest.mark.parametrize("seed", range(100))
def test_groups_share_what_they_say_and_no_row_is_in_two(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 0)
    monkeypatch.setattr(sharing, "MIN_SAVED_SHARE", 0.0)
    table, lens = random_rows(np.random.default_rng(seed))
    groups = shared_groups(table, np.arange(len(lens)), lens, PAGE)
    members = [int(row) for group in groups for row in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        assert len(group.members) >= sharing.MIN_ROWS
        assert group.num_pages >= sharing.MIN_PAGES
        assert len({tuple(table[row, : group.num_pages]) for row in group.members}) == 1
        # Always some tokens of a row's own: its newest is in no full page that others have.
        assert (lens[group.members] > group.num_pages * PAGE).all()
    saved = sum(group.num_saved for group in groups)
    assert saved >= best_single_group(table, lens)


def best_single_group(table: np.ndarray, lens: np.ndarray) -> int:
    """The pages that the best group of all rows with one prefix saves."""
    best = 0
    for row, length in enumerate(lens):
        for count in range(sharing.MIN_PAGES, (length - 1) // PAGE + 1):
            same = (table[:, :count] == table[row, :count]).all(axis=1)
            same &= (lens - 1) // PAGE >= count
            if same.sum() >= sharing.MIN_ROWS:
                best = max(best, int(same.sum() - 1) * count)
    return best


def test_little_is_not_worth_a_second_launch() -> None:
    table = np.arange(800, dtype=np.int32).reshape(8, 100)
    table[:, :50] = table[0, :50]
    assert shared_groups(table, ROWS, np.full(8, 400), PAGE) == []
    assert len(shared_groups(table, ROWS, np.full(8, 1600), 16)) == 0
    assert len(shared_groups(table, ROWS, np.full(8, 6400), 64)) == 1


def test_arrays_say_for_each_block_its_rows_and_tokens() -> None:
    groups = [
        PrefixGroup(np.arange(5, 5 + MEMBERS + 3), 7),
        PrefixGroup(np.array([1, 0, 2, 30]), 9),
    ]
    lens, members, blocks = shared_arrays(groups, 40, PAGE)
    assert blocks.shape == (most_blocks(40), 3)
    assert blocks[:4].tolist() == [
        [0, MEMBERS, 28],
        [MEMBERS, 3, 28],
        [MEMBERS + 3, 4, 36],
        [0] * 3,
    ]
    assert members[: MEMBERS + 7].tolist() == [*range(5, 5 + MEMBERS + 3), 1, 0, 2, 30]
    assert lens[[0, 1, 2, 30]].tolist() == [36] * 4
    assert (lens[5 : 5 + MEMBERS + 3] == 28).all()
    assert lens.sum() == 4 * 36 + (MEMBERS + 3) * 28


def test_there_is_room_for_the_blocks_of_any_groups() -> None:
    for num_rows in range(4, 100):
        smallest = [
            PrefixGroup(np.arange(first, first + 4), 4) for first in range(0, num_rows - 3, 4)
        ]
        shared_arrays(smallest, num_rows, PAGE)
        shared_arrays([PrefixGroup(np.arange(num_rows), 4)], num_rows, PAGE)
