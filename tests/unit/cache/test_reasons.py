"""Why the rest of a prompt was not cached (S07): every reason, and the tokens it cost."""

from __future__ import annotations

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.outcomes import Ending
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, LoadCosts
from manyroots.ids import Namespace
from tests.helpers.cache_harness import (
    ADAPTER_A,
    ADAPTER_B,
    BASE,
    CacheHarness,
    ints,
    recurrent,
    window,
)

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def why(hand: CacheHarness, tokens: list[int], key: PrefixKey = KEY) -> Limit:
    """What a request is told: by its lease, as by looking."""
    limit = hand.cache.lookup(key, ints(*tokens)).limit
    lease = hand.cache.claim(key, ints(*tokens), len(tokens), may_reuse=True)
    assert lease.limit is limit
    hand.cache.release(lease, Ending.DROPPED)
    audit(hand.cache)
    return limit


def push_out(hand: CacheHarness, plane: int) -> None:
    hand.cache.evictors[plane].evict(hand.cache.index.pools[plane].num_cached)


@pytest.mark.parametrize("capacities", [(), (Capacity(FULL_ATTENTION, 16, 16),)])
def test_s07_cold(capacities: tuple[Capacity, ...]) -> None:
    hand = CacheHarness(*capacities)
    assert why(hand, PROMPT) is Limit.COLD
    hand.serve(KEY, PROMPT)
    assert why(hand, PROMPT) is Limit.NOTHING
    assert why(hand, [*PROMPT[:4], 9, 9, 9]) is Limit.COLD
    assert why(hand, [8, *PROMPT]) is Limit.COLD


@pytest.mark.parametrize("capacities", [(), (Capacity(FULL_ATTENTION, 16, 16),)])
def test_s07_other_namespace(capacities: tuple[Capacity, ...]) -> None:
    """S07: known with other weights only; no longer when that has gone."""
    hand = CacheHarness(*capacities)
    hand.serve(PrefixKey(ADAPTER_A), PROMPT)
    assert why(hand, PROMPT) is Limit.NAMESPACE
    assert why(hand, PROMPT, PrefixKey(ADAPTER_B)) is Limit.NAMESPACE
    assert why(hand, PROMPT, PrefixKey(ADAPTER_A)) is Limit.NOTHING
    assert why(hand, [8, *PROMPT]) is Limit.COLD
    hand.settle()
    hand.cache.evict_namespace(ADAPTER_A)
    assert why(hand, PROMPT) is Limit.COLD


def test_s07_a_tenant_is_not_told_what_another_has() -> None:
    """S07, N02: a salt keeps apart, and that something is cached is itself something to know."""
    hand = CacheHarness()
    mine, theirs = Namespace(None, "mine"), Namespace(None, "theirs")
    hand.serve(PrefixKey(theirs), PROMPT)
    assert why(hand, PROMPT, PrefixKey(mine)) is Limit.COLD
    assert why(hand, PROMPT) is Limit.COLD
    my_adapter = Namespace(ADAPTER_A.adapter, "mine")
    hand.serve(PrefixKey(my_adapter), PROMPT)
    assert why(hand, PROMPT, PrefixKey(mine)) is Limit.NAMESPACE


@pytest.mark.parametrize("longer", [True, False])
def test_s07_other_namespace_where_an_adapter_takes_over(longer: bool) -> None:
    """S07, N22: base has the rest, in one run with what is shared or in a node of its own."""
    hand = CacheHarness()
    if not longer:
        hand.serve(KEY, PROMPT[:5])
        hand.serve(KEY, [*PROMPT[:4], 9, 9, 9])
    hand.serve(KEY, PROMPT)
    key = PrefixKey.activated(BASE, ADAPTER_A, 4, 2)
    assert hand.found(key, PROMPT) == 4
    assert why(hand, PROMPT, key) is Limit.NAMESPACE
    assert why(hand, [*PROMPT[:4], 8, 8, 8], key) is Limit.COLD


def test_s07_window_evicted() -> None:
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16))
    hand.serve(KEY, PROMPT)
    push_out(hand, 1)
    assert why(hand, PROMPT) is Limit.WINDOW


def test_s07_checkpoint_missing() -> None:
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(1), 16))
    hand.serve(KEY, PROMPT)
    push_out(hand, 1)
    assert why(hand, PROMPT) is Limit.CHECKPOINT


def test_s07_tier_too_slow() -> None:
    slow = CachePolicies(load_costs=LoadCosts(seconds_per_page=3.0, seconds_per_token=1.0))
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=slow)
    hand.serve(KEY, PROMPT)
    hand.settle()
    assert why(hand, PROMPT) is Limit.NOTHING
    push_out(hand, 0)
    assert why(hand, PROMPT) is Limit.TIER


def test_s07_nothing_is_said_to_be_missing_where_nothing_is_reused() -> None:
    hand = CacheHarness(policies=CachePolicies(reuse=False))
    assert why(hand, PROMPT) is Limit.OFF
    hand = CacheHarness()
    hand.serve(KEY, PROMPT)
    whole = hand.claim(KEY, PROMPT, may_reuse=False)
    assert whole.held.limit is Limit.OFF
    hand.end(whole)


def test_s07_the_tokens_that_were_not_reused_are_counted_by_the_reason() -> None:
    """S07: of whole pages, once per request that begins; what could never be is not counted."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(1), 16))

    def begin(key: PrefixKey, tokens: list[int]) -> None:
        sequence = hand.run(key, tokens)
        hand.end(sequence)

    begin(KEY, PROMPT)
    assert hand.cache.stats().missed_tokens == {"cold": 6}
    begin(KEY, PROMPT)
    begin(KEY, [1])
    assert hand.cache.stats().missed_tokens == {"cold": 6}
    begin(PrefixKey(ADAPTER_A), PROMPT)
    push_out(hand, 1)
    begin(KEY, PROMPT)
    begin(KEY, [*PROMPT[:4], 9, 9, 9, 9, 9])  # from a state that the last one saved
    assert hand.cache.stats().missed_tokens == {"cold": 10, "namespace": 6, "checkpoint": 6}
