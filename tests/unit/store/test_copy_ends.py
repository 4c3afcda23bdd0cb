"""Copies on several ranks: one end for all of them, and no page of which a rank lacks its part."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from manyroots.ids import CopyId
from manyroots.step import CopyDone
from manyroots.store.copy_ends import CollectedEnds, ForwardedEnds
from tests.helpers.patience import PATIENCE_S


def done(*arrived: bool, copy: int = 1, error: str | None = None, seconds: float = 0.0) -> CopyDone:
    return CopyDone(CopyId(copy), np.array(arrived), error=error, seconds=seconds)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_t15_a_copy_has_ended_when_every_rank_has_ended_it(order: tuple[int, ...]) -> None:
    """T15: whichever rank is last; a unit that one rank lacks has arrived on none."""
    ends = CollectedEnds(num_ranks=3)
    ends.expect(1)
    answers = [
        done(True, True, False, True, seconds=0.1),
        done(True, False, True, True, seconds=0.4),
        done(True, True, True, True, seconds=0.2),
    ]
    for rank in order:
        assert ends.take() == ()
        ends.hear(rank, answers[rank])
    [joined] = ends.take()
    assert joined.arrived.tolist() == [True, False, False, True]
    assert (joined.error, joined.seconds) == (None, 0.4)
    assert ends.take() == (), "an end is told once"


def test_t15_the_ranks_that_failed_are_named() -> None:
    """T15: nothing that a failed rank was to copy has arrived, and its error says which rank."""
    ends = CollectedEnds(num_ranks=2)
    ends.expect(2)
    ends.report(done(True))
    ends.hear(1, done(False, error="no answer in 5 s"))
    ends.hear(1, done(True, copy=2))
    [joined] = ends.take()
    assert joined.arrived.tolist() == [False]
    assert joined.error == "on rank 1: no answer in 5 s"
    ends.report(done(False, copy=2, error="disk"))
    assert [each.error for each in ends.take()] == ["disk"]


def test_t11_t15_waiting_ends_when_no_copy_is_left() -> None:
    """T11, T15: the first rank waits for all ranks; the others wait for nothing."""
    ends = CollectedEnds(num_ranks=2)
    ends.wait(PATIENCE_S)  # nothing is under way
    ends.expect(1)
    ends.report(done(True))
    ends.wait(0.01)
    assert ends.take() == ()
    ends.hear(1, done(True))
    ends.wait(PATIENCE_S)
    assert len(ends.take()) == 1
    told: list[CopyDone] = []
    other = ForwardedEnds(told.append)
    other.expect(3)
    other.wait(PATIENCE_S)
    other.report(done(True, copy=7))
    assert [each.copy_id for each in told] == [7]
    assert other.take() == ()
