"""Things come in the order of their ranks, however these have changed since the last look."""

from __future__ import annotations

import random

import pytest

from manyroots.scheduler.ranking import Ranking


class Thing:
    def __init__(self, rank: tuple[int, int]) -> None:
        self.rank: tuple[int, int] | None = rank


@pytest.mark.parametrize("seed", range(20))
def test_the_first_few_are_those_with_the_lowest_ranks_now(seed: int) -> None:
    rng = random.Random(seed)
    ranking: Ranking[Thing] = Ranking()
    things: list[Thing] = []
    for number in range(300):
        what = rng.randrange(6)
        if what <= 1 or not things:
            things.append(Thing((rng.randrange(50), number)))
            ranking.note(things[-1])
        elif what == 2:  # grows, without a notice
            thing = rng.choice(things)
            thing.rank = (thing.rank[0] + rng.randrange(20), number)
        elif what == 3:
            thing = rng.choice(things)
            thing.rank = (thing.rank[0] - rng.randrange(20), number)
            ranking.note(thing)
        elif what == 4:
            thing = things.pop(rng.randrange(len(things)))
            thing.rank = None
            ranking.forget(thing)
        count = rng.randrange(1, 8)
        assert ranking.first_few(count) == sorted(things, key=lambda t: t.rank)[:count]
        assert ranking.first_few(count) == sorted(things, key=lambda t: t.rank)[:count]


def test_entries_count_by_number_and_not_by_identity() -> None:
    """A compiler (mypyc) keeps tuples as values, so the heap and the table hold copies."""
    things = [Thing((number, 0)) for number in range(3)]
    ranking = Ranking(things)
    ranking._heap = [(*entry,) for entry in ranking._heap]
    assert ranking.first() is things[0]
    assert ranking.first_rank() == things[0].rank
    assert ranking.first_few(2) == things[:2]
