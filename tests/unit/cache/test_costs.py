"""Load or recompute, by what was measured (T05)."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.costs import RETRY_AFTER, Costs
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.outcomes import Ending
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import FREE_LOADS, CachePolicies, LoadCosts
from manyroots.ids import Tier
from manyroots.step import CopyDone
from tests.helpers.cache_harness import BASE, CacheHarness, ints, recurrent

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def warm_host(*capacities: Capacity) -> CacheHarness:
    """A prompt's three pages are on the host alone."""
    hand = CacheHarness(*capacities or (Capacity(FULL_ATTENTION, 16, 16),))
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand)
    return hand


def push_out(hand: CacheHarness) -> None:
    for plane in hand.layout.device:
        pool = hand.cache.index.pools[plane.index]
        hand.cache.evictors[plane.index].evict(pool.num_cached)


def load(hand: CacheHarness, seconds: float) -> None:
    """A request loads the prompt, and the copy says how long it took."""
    sequence = hand.claim(KEY, PROMPT)
    assert hand.cache.onboard(sequence.held) is None
    for copy in hand.take_copies():
        _, contents = hand.under_way.pop(copy.copy_id)
        for place, content in enumerate(contents):
            hand._write_copy(copy, place, content)
        done = CopyDone(copy.copy_id, np.ones(len(contents), np.bool_), seconds=seconds)
        hand.cache.acknowledge(done)
    hand.plan(sequence)
    hand.commit()
    hand.end(sequence)
    hand.settle()
    push_out(hand)


def test_t05_what_was_never_measured_is_tried() -> None:
    costs = Costs(FREE_LOADS)
    costs.measured_prefill(1000, 0.001)
    assert costs.is_worth_loading(1, 16)
    assert costs.is_worth_fetching(1, 16)


@pytest.mark.parametrize(("load_s", "is_worth"), [(2.9, True), (3.1, False)])
def test_t05_the_break_even_is_where_loading_takes_as_long_as_computing(
    load_s: float, is_worth: bool
) -> None:
    """T05: 100 pages in `load_s` against 1600 tokens in 3 seconds."""
    costs = Costs(FREE_LOADS)
    costs.measured_load(Tier.HOST, 0, 100, load_s)
    costs.measured_prefill(1600, 3.0)
    assert costs.is_worth_loading(10, 160) is is_worth


def test_t05_a_page_costs_a_unit_of_every_family_and_from_storage_both_ways() -> None:
    costs = Costs(FREE_LOADS)
    costs.measured_prefill(16, 1.0)
    costs.measured_load(Tier.HOST, 0, 10, 6.0)
    assert costs.is_worth_loading(1, 16)
    costs.measured_load(Tier.HOST, 1, 10, 3.0)
    assert costs.is_worth_loading(1, 16)
    assert costs.is_worth_fetching(1, 16)
    costs.measured_load(Tier.STORAGE, 0, 10, 2.0)
    assert costs.is_worth_loading(1, 16)
    assert not costs.is_worth_fetching(1, 16)
    costs.measured_load(Tier.HOST, 1, 10, 6.0)
    assert not costs.is_worth_loading(1, 16)


def test_t05_newer_measurements_count_more() -> None:
    costs = Costs(FREE_LOADS)
    costs.measured_prefill(16, 1.0)
    costs.measured_load(Tier.HOST, 0, 10, 100.0)
    assert not costs.is_worth_loading(1, 16)
    for _ in range(30):
        costs.measured_load(Tier.HOST, 0, 10, 1.0)
    assert costs.is_worth_loading(1, 16)


def test_t05_a_miss_counts_only_where_it_is_slower_than_what_is_known() -> None:
    """T05: that something is not there is soon said; if it is not, the tier is slow."""
    costs = Costs(FREE_LOADS)
    costs.measured_prefill(16, 1.0)
    costs.measured_load(Tier.STORAGE, 0, 10, 20.0)
    for _ in range(100):
        costs.measured_miss(Tier.STORAGE, 0, 10, 0.001)
    assert not costs.is_worth_fetching(1, 16)
    fresh = Costs(FREE_LOADS)
    fresh.measured_prefill(16, 1.0)
    fresh.measured_miss(Tier.STORAGE, 0, 10, 20.0)
    assert not fresh.is_worth_fetching(1, 16)


def test_t05_s07_a_slow_host_is_left_alone_and_the_match_says_so() -> None:
    """T05, S07: measured on its first load; from then on the prompt is computed. Nothing but the
    reason and the choice changes: what is there is still found."""
    hand = warm_host()
    hand.cache.measured_prefill(100, 1.0)
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.NOTHING
    load(hand, seconds=60.0)
    match = hand.cache.lookup(KEY, ints(*PROMPT))
    assert (match.num_pages, match.num_worthwhile_pages, match.limit) == (3, 0, Limit.TIER)
    sequence = hand.claim(KEY, PROMPT)
    assert sequence.num_computed == 0
    assert sequence.held.limit is Limit.TIER
    hand.end(sequence)
    assert hand.serve(KEY, PROMPT) == 0


def test_t05_a_quick_host_is_used() -> None:
    hand = warm_host(Capacity(FULL_ATTENTION, 16, 16), Capacity(recurrent(1), 8, 8))
    hand.cache.measured_prefill(100, 1.0)
    load(hand, seconds=0.001)
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.NOTHING
    assert hand.serve(KEY, PROMPT) == 6


def test_t05_a_slow_tier_is_tried_again_after_many_requests() -> None:
    """T05: or a moment's delay would cost the tier for good."""
    hand = warm_host()
    hand.cache.measured_prefill(100, 1.0)
    load(hand, seconds=60.0)
    for _ in range(RETRY_AFTER):
        lease = hand.cache.claim(KEY, ints(*PROMPT), len(PROMPT), may_reuse=True)
        assert lease.num_cached_tokens == 0
        hand.cache.begin(lease, len(PROMPT))
        hand.cache.release(lease, Ending.DROPPED)
    assert hand.found(KEY, PROMPT) == 6
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.NOTHING


def test_t05_slow_storage_is_not_asked() -> None:
    """T05: not even with best effort, since its answers would be of no use."""
    for per_page, is_asked in [(3.0, False), (1.0, True)]:
        costs = LoadCosts(0.0, 1.0, storage_seconds_per_page=per_page)
        hand = CacheHarness(
            Capacity(FULL_ATTENTION, 16, 16),
            policies=CachePolicies(uses_storage=True, load_costs=costs),
        )
        assert (hand.cache.prefetch(KEY, ints(*PROMPT)) is not None) is is_asked
        hand.settle()


def test_t05_quick_misses_do_not_make_slow_storage_worth_asking() -> None:
    """T05: storage brings three pages in 3 s, ten times what computing them takes, and says at
    once that it lacks others. It is not asked again, however often it said that."""
    policies = CachePolicies(uses_storage=True)
    old = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    old.serve(KEY, PROMPT)
    old.settle()
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 64), policies=policies, storage=old.storage)
    hand.cache.measured_prefill(20, 1.0)
    unknown = [[8 + i, *PROMPT[1:]] for i in range(12)]
    for prompt in (PROMPT, *unknown):  # all are asked for before any answer comes
        assert hand.cache.prefetch(KEY, ints(*prompt)) is not None
    found = []
    for copy in hand.take_copies():
        _, contents = hand.under_way.pop(copy.copy_id)
        arrived = np.array([content != () for content in contents], np.bool_)
        found.append(int(arrived.sum()))
        seconds = 3.0 if arrived.all() else 1e-6
        hand.cache.acknowledge(CopyDone(copy.copy_id, arrived, seconds=seconds))
    assert found == [3] + [0] * 12
    assert hand.cache.prefetch(KEY, ints(30, *PROMPT[1:])) is None
    assert hand.cache.left_storage_alone


def test_t05_of_a_window_or_a_state_only_what_is_resumed_from_counts() -> None:
    """T05: 100 pages of full attention and one state."""
    costs = Costs(FREE_LOADS, {1: 1})
    costs.measured_prefill(1, 1.0)
    costs.measured_load(Tier.HOST, 0, 100, 1.0)
    costs.measured_load(Tier.HOST, 1, 1, 5.0)
    assert costs.is_worth_loading(100, 7)
    assert not costs.is_worth_loading(100, 6)
