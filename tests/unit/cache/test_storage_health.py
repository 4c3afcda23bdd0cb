"""A storage tier that fails: counted, logged once, left alone for a while (T03)."""

from __future__ import annotations

import logging

import pytest

from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.cache.storage_health import (
    FIRST_REST_STEPS,
    MAX_FAILURES,
    MAX_REST_STEPS,
    DirectionHealth,
)
from manyroots.ids import StepId, Tier
from manyroots.messages import StorageStats
from manyroots.step import Copy
from tests.helpers.cache_harness import BASE, CacheHarness, ints

KEY = PrefixKey(BASE)


def with_storage() -> CacheHarness:
    policies = CachePolicies(uses_storage=True)
    return CacheHarness(Capacity(FULL_ATTENTION, 64, 64), policies=policies)


def stats(hand: CacheHarness) -> StorageStats:
    found = hand.cache.stats().storage
    assert found is not None
    return found


def ask(hand: CacheHarness, number: int) -> Copy | None:
    """Three pages that no tier has."""
    if hand.cache.prefetch(KEY, ints(100 + number, *range(7))) is None:
        return None
    [copy] = hand.take_copies()
    return copy


def break_down(hand: CacheHarness) -> None:
    for number in range(MAX_FAILURES):
        copy = ask(hand, number)
        assert copy is not None
        hand.acknowledge(copy, error="connection refused")


def pass_steps(hand: CacheHarness, count: int) -> None:
    for _ in range(count):
        hand.plan()
        hand.commit()


def test_t03_what_storage_did_not_give_is_counted_by_cause() -> None:
    """T03: missing where it answered, failed where it did not, unwritten where it took nothing."""
    hand = with_storage()
    for number, error in enumerate([None, "connection refused", None]):
        copy = ask(hand, number)
        assert copy is not None
        hand.acknowledge(copy, error=error)
    assert (stats(hand).total_missing_units, stats(hand).total_failed_units) == (6, 3)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    [to_host] = hand.take_copies()
    hand.acknowledge(to_host)
    [to_storage] = hand.take_copies()
    hand.acknowledge(to_storage, error="no space left on device")
    assert stats(hand).total_unwritten_units == 2
    assert stats(hand).total_outages == 0


def test_t03_storage_that_keeps_failing_is_left_alone_and_tried_again() -> None:
    """T03: after so many steps; requests are served without it meanwhile."""
    hand = with_storage()
    break_down(hand)
    assert not stats(hand).is_read
    assert stats(hand).total_outages == 1
    assert ask(hand, 10) is None
    assert hand.serve(KEY, [1, 2, 3]) == 0
    pass_steps(hand, FIRST_REST_STEPS)
    assert stats(hand).is_read
    copy = ask(hand, 11)
    assert copy is not None
    hand.acknowledge(copy)
    pass_steps(hand, 1)
    assert ask(hand, 12) is not None


def test_t03_one_answer_in_between_is_no_outage() -> None:
    """T03: only failures in a row count."""
    hand = with_storage()
    for number in range(4 * MAX_FAILURES):
        copy = ask(hand, number)
        assert copy is not None
        fails = (number + 1) % MAX_FAILURES
        hand.acknowledge(copy, error="timed out" if fails else None)
    assert stats(hand).total_outages == 0


def test_t03_a_full_disk_is_still_read() -> None:
    """T03: what fails is writing; storage gives what it has."""
    hand = with_storage()
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.settle()
    assert hand.storage
    for number in range(MAX_FAILURES):
        hand.serve(KEY, [20 + number, 2, 3])
        [to_host] = hand.take_copies()
        hand.acknowledge(to_host)
        [to_storage] = hand.take_copies()
        assert to_storage.target is Tier.STORAGE
        hand.acknowledge(to_storage, error="no space left on device")
    assert (stats(hand).is_read, stats(hand).is_written) == (True, False)
    hand.serve(KEY, [30, 2, 3])
    [to_host] = hand.take_copies()
    hand.acknowledge(to_host)
    assert hand.take_copies() == []
    for plane in hand.layout.planes:
        hand.cache.evictors[plane.index].evict(hand.cache.index.pools[plane.index].num_cached)
    assert hand.cache.prefetch(KEY, ints(1, 2, 3, 4, 5)) is not None
    hand.settle()
    assert hand.found(KEY, [1, 2, 3, 4, 5]) == 4


def test_t03_an_outage_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """T03: however many pages, copies and tries it costs."""
    caplog.set_level(logging.INFO, "manyroots.cache.storage_health")
    hand = with_storage()
    copies = [ask(hand, number) for number in range(20)]
    for copy in copies:
        assert copy is not None
        hand.acknowledge(copy, error="connection refused")
    for number in range(3):
        pass_steps(hand, MAX_REST_STEPS if number == 2 else FIRST_REST_STEPS << number)
        copy = ask(hand, 100 + number)
        assert copy is not None
        hand.acknowledge(copy, error=None if number == 2 else "connection refused")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "connection refused" in caplog.records[0].getMessage()
    assert stats(hand).total_outages == 1


def test_t03_each_failed_try_makes_the_rest_longer_up_to_a_limit() -> None:
    """T03: a dead server costs less and less, and is always tried again."""
    health = DirectionHealth("reading from")
    step, rests = 1, []
    for _ in range(12):
        while health.is_good(StepId(step)):
            health.failed(StepId(step), "gone")
        begin = step
        while not health.is_good(StepId(step)):
            step += 1
        rests.append(step - begin)
    assert rests[:3] == [FIRST_REST_STEPS, 2 * FIRST_REST_STEPS, 4 * FIRST_REST_STEPS]
    assert rests[-1] == rests[-2] == MAX_REST_STEPS
