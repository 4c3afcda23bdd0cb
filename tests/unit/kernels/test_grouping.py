"""Which rows attend together."""

from __future__ import annotations

import numpy as np

from manyroots.kernels.attention.grouping import (
    MIN_SHARED_PAGES,
    MIN_SHARING_ROWS,
    GroupingLimits,
    decode_clusters,
    plan_decodes,
    plan_prefills,
)
from tests.helpers.seeded import Draw, for_seeds

PAGE_SIZE = 4


@for_seeds(200)
def test_decode_groups_cover_all_rows_once_within_both_limits(draw: Draw) -> None:
    counts = draw.list_of(lambda: draw.integer(1, 40), least=1, most=30)
    min_fill = draw.choice((0.1, 1.0, draw.uniform(0.1, 1.0)))
    limits = GroupingLimits(min_fill=min_fill, max_tokens=200)
    num_pages = np.array(sorted(counts, reverse=True))
    table = np.zeros((len(counts), 40), dtype=np.int64)
    for row, count in enumerate(num_pages):
        table[row, :count] = 1000 * row + np.arange(1, count + 1)
    plans = list(plan_decodes(table, num_pages, PAGE_SIZE, limits))
    assert [row for plan in plans for row in range(plan.start, plan.stop)] == list(
        range(len(counts))
    )
    for plan in plans:
        longest = num_pages[plan.start]
        assert plan.pages.shape == (plan.stop - plan.start, longest)
        assert num_pages[plan.stop - 1] >= min_fill * longest
        assert plan.stop - plan.start == 1 or plan.pages.size * PAGE_SIZE <= limits.max_tokens
        for row, pages in zip(range(plan.start, plan.stop), plan.pages, strict=True):
            # Padding repeats the row's own first page, never another sequence's.
            assert set(pages) == set(table[row, : num_pages[row]])


@for_seeds(200)
def test_every_row_is_in_one_cluster_from_long_to_short(draw: Draw) -> None:
    counts = np.array(draw.list_of(lambda: draw.integer(0, 9), most=20), dtype=np.int64)
    heads = [draw.integer(0, 3) for _ in counts]
    table = np.arange(20 * len(counts)).reshape(len(counts), 20) + 1000
    for row, head in enumerate(heads):  # some begin alike; those of head 0 do not
        if head:
            table[row, :MIN_SHARED_PAGES] = head * 10 + np.arange(MIN_SHARED_PAGES)
    clusters = decode_clusters(table, counts)
    assert sorted(row for rows in clusters for row in rows) == np.flatnonzero(counts).tolist()
    for rows in clusters:
        assert (np.diff(counts[rows]) <= 0).all()
    for head in (1, 2, 3):
        own = {row for row, h in enumerate(heads) if h == head and counts[row] > MIN_SHARED_PAGES}
        if len(own) >= MIN_SHARING_ROWS and len(own) < np.count_nonzero(counts):
            assert any(own == set(rows.tolist()) for rows in clusters)


def test_prefill_groups_respect_the_limit_but_never_split_a_sequence() -> None:
    table = np.arange(40).reshape(4, 10)
    limits = GroupingLimits(min_fill=1.0, max_tokens=64)
    plans = list(plan_prefills(table, [0, 5, 10, 15, 20], [32, 32, 32, 40], PAGE_SIZE, limits))
    assert [(plan.first_token, plan.num_seqs, plan.context_len) for plan in plans] == [
        (0, 2, 32),
        (10, 1, 32),
        (15, 1, 40),
    ]
    assert plans[0].pages.tolist() == [list(range(8)), list(range(10, 18))]
