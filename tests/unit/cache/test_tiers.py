"""Tiers: write-back, load-back and prefetch as decisions, with copies that fail or come late."""

from __future__ import annotations

from itertools import permutations

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import Owner, PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, LoadCosts, WriteBack
from manyroots.cache.prefetch import Share
from manyroots.ids import Tier
from manyroots.step import Copy
from tests.helpers.cache_harness import (
    ADAPTER_A,
    BASE,
    CacheHarness,
    Path,
    ints,
    path_of,
    recurrent,
    resident,
    window,
)

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def tiered(device: int = 16, host: int = 16, **policies: object) -> CacheHarness:
    return CacheHarness(
        Capacity(FULL_ATTENTION, device, host),
        policies=CachePolicies(**policies),  # type: ignore[arg-type]
    )


def push_out(hand: CacheHarness, *, keep: int = 0) -> None:
    """Evict from the device all units without a holder, but for `keep` units of each family."""
    for plane in hand.layout.device:
        pool = hand.cache.index.pools[plane.index]
        hand.cache.evictors[plane.index].evict(pool.num_cached - keep)
    audit(hand.cache)


def held(hand: CacheHarness) -> list[int]:
    return [plane.num_held for plane in hand.cache.stats().planes]


def on_host(hand: CacheHarness) -> int:
    return hand.cache.stats().planes[-1].num_cached


def under_way(hand: CacheHarness) -> list[Copy]:
    hand.take_copies()
    return [copy for copy, _ in hand.under_way.values()]


def between_tiers(copies: list[Copy], target: Tier) -> list[Copy]:
    return [copy for copy in copies if copy.target is target and copy.source is not target]


def test_t01_write_through_copies_what_is_published() -> None:
    """T01: as soon as its step has committed, and not before."""
    hand = tiered(write_back=WriteBack.THROUGH)
    sequence = hand.claim(KEY, PROMPT)
    assert hand.plan(sequence).copies == ()
    hand.commit()
    [copy] = hand.take_copies()
    assert (copy.source, copy.target) == (Tier.DEVICE, Tier.HOST)
    assert len(copy.source_units) == 3
    hand.end(sequence)
    hand.settle()
    assert on_host(hand) == 3


def test_t01_selective_write_back_copies_what_was_found_again() -> None:
    """T01: nothing on the first use; what a second request found as it begins, and no more."""
    hand = tiered(write_back=WriteBack.REUSED)
    hand.serve(KEY, PROMPT)
    hand.serve(KEY, [20, 21, 22])
    hand.settle()
    assert on_host(hand) == 0
    hand.serve(KEY, PROMPT)
    hand.settle()
    assert on_host(hand) == 3


def test_t01_a_write_back_makes_room_on_the_host_and_takes_nothing_from_the_device() -> None:
    """T01: the host may be full where the device has room to spare; what it loses then is its own
    least recently used, and no more than the copies need."""
    hand = tiered(device=16, host=4, write_back=WriteBack.REUSED)
    other = [20, 21, 22, 23, 24]
    for prompt in (PROMPT, PROMPT, other):
        hand.serve(KEY, prompt)
        hand.settle()
    before = resident(hand.cache)
    num_free = hand.cache.stats().planes[0].num_free
    assert (num_free, on_host(hand)) == (11, 3)
    again = hand.claim(KEY, other)
    assert resident(hand.cache) == before
    hand.plan(again)  # two pages to copy, one free
    lost = {entry for entry in before if entry not in resident(hand.cache)}
    assert lost == {(1, path_of(KEY, PROMPT, 3, 2))}
    hand.commit()
    hand.end(again)
    hand.settle()
    assert on_host(hand) == 4


def test_t01_a_claim_that_does_not_begin_has_nothing_copied() -> None:
    """T01: a request that waits is claimed in every step; copies of what it found would hold the
    very room that it waits for."""
    hand = tiered(write_back=WriteBack.REUSED)
    hand.serve(KEY, PROMPT)
    for _ in range(3):
        hand.end(hand.claim(KEY, PROMPT), Ending.DROPPED)
        assert hand.take_copies() == []


def test_t01_write_back_on_eviction_copies_what_would_go_next() -> None:
    """T01: nothing while there is room; then the least recently used, before it is evicted."""
    hand = tiered(device=8, host=8, write_back=WriteBack.EVICTION, low_water=0.5)
    hand.serve(KEY, PROMPT)
    hand.settle()
    assert on_host(hand) == 0
    hand.serve(KEY, [20, 21, 22, 23, 24])
    hand.settle()
    found = {path[0][1] for plane, path in resident(hand.cache) if plane == 1}
    assert found == {path_of(KEY, PROMPT, 1, 2)[0][1]}


@pytest.mark.parametrize("policy", list(WriteBack))
def test_t01_both_ends_are_pinned_until_acknowledged(policy: WriteBack) -> None:
    """T01: however much room is wanted meanwhile, on either tier; then both are let go."""
    hand = tiered(device=4, host=3, write_back=policy, low_water=1.0)
    hand.serve(KEY, PROMPT)
    hand.serve(KEY, PROMPT)  # found again, for the policy that waits for that
    hand.take_copies()
    [copy] = [copy for copy, _ in hand.under_way.values()]
    assert held(hand) == [3, 3]
    other = hand.claim(KEY, [20, 21, 22, 23])
    step = hand.plan(other)
    assert not step.parts, "room was made of pages that are being copied"
    hand.commit()
    assert held(hand) == [3, 3]
    hand.acknowledge(copy)
    assert held(hand) == [0, 0]
    assert hand.found(KEY, PROMPT) == 6
    assert hand.plan(other).parts
    hand.commit()
    hand.end(other)


def test_t01_a_page_is_not_copied_before_it_is_filled() -> None:
    """T01: found again within the very step that fills it, it is not written back yet."""
    hand = tiered(write_back=WriteBack.REUSED)
    one = hand.claim(KEY, PROMPT)
    hand.plan(one)
    two = hand.claim(KEY, PROMPT)
    assert two.num_computed == 6
    step = hand.plan(two)
    assert between_tiers(list(step.copies), Tier.HOST) == []
    hand.commit()
    hand.commit()
    hand.end(one)
    hand.end(two)
    hand.serve(KEY, PROMPT)
    hand.settle()
    assert on_host(hand) == 3


@pytest.mark.parametrize("mix", ["full", "full+window", "full+state", "full+window+state"])
def test_h03_a_prefix_that_is_only_on_the_host_is_loaded_not_computed(mix: str) -> None:
    """H03: claimed, loaded back, and then only the rest is computed; counted as host tokens."""
    kinds = {"full": FULL_ATTENTION, "window": window(4, 2), "state": recurrent(1)}
    hand = CacheHarness(*(Capacity(kinds[name], 16, 16) for name in mix.split("+")))
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand)
    sequence = hand.claim(KEY, PROMPT)
    assert (sequence.num_computed, sequence.held.num_host_tokens) == (6, 6)
    assert not sequence.held.is_ready
    assert hand.cache.onboard(sequence.held) is None
    assert not sequence.held.is_ready
    copies = hand.take_copies()
    assert {(copy.source, copy.target) for copy in copies} == {(Tier.HOST, Tier.DEVICE)}
    assert len(copies) == len(mix.split("+"))
    for copy in copies:
        hand.acknowledge(copy)
    assert sequence.held.is_ready
    [part] = hand.plan(sequence).parts
    assert (part.begin, part.end) == (6, 7)
    hand.commit()
    hand.end(sequence)
    hand.settle()
    assert hand.cache.lookup(KEY, ints(*PROMPT)).num_device_pages == 3


def test_h03_what_the_device_still_has_is_not_loaded_again() -> None:
    """H03: only the missing pages travel."""
    hand = tiered()
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand, keep=1)
    sequence = hand.claim(KEY, PROMPT)
    assert sequence.held.num_host_tokens == 4
    hand.cache.onboard(sequence.held)
    [copy] = hand.take_copies()
    assert len(copy.target_units) == 2
    hand.settle()
    hand.plan(sequence)
    hand.commit()
    hand.end(sequence)


def test_t05_a_tier_too_slow_to_be_worth_it_is_left_alone() -> None:
    """T05: loading a page takes longer than computing its tokens: recompute, and the other way
    round; decided for each request."""
    for per_page, found in [(3.0, 2), (1.0, 6)]:
        hand = tiered(load_costs=LoadCosts(seconds_per_page=per_page, seconds_per_token=1.0))
        hand.serve(KEY, PROMPT)
        hand.settle()
        push_out(hand, keep=1)
        assert hand.cache.lookup(KEY, ints(*PROMPT)).num_pages == 3
        sequence = hand.claim(KEY, PROMPT)
        assert sequence.num_computed == found
        assert bool(sequence.held.onboarding) == (found == 6)
        hand.end(sequence, Ending.DROPPED)
        assert hand.serve(KEY, PROMPT) == found
        assert held(hand) == [0, 0]


def test_c01_one_requests_loading_cannot_evict_what_another_has_claimed() -> None:
    """C01: with host and device full. All claims first, then room is made: what is claimed on
    either tier stays until it is let go."""
    hand = tiered(device=6, host=6)
    one, two = PROMPT, [21, 22, 23, 24, 25, 26, 27]
    for prompt in (one, two):
        hand.serve(KEY, prompt)
        hand.settle()
    push_out(hand)
    first, second = hand.claim(KEY, one), hand.claim(KEY, two)
    assert [s.num_computed for s in (first, second)] == [6, 6]
    assert hand.cache.onboard(first.held) is None
    hand.settle()
    # Publishing and writing back a new prompt wants room on the host: there is none to be had.
    other = hand.claim(KEY, [31, 32, 33])
    hand.plan(other)
    hand.commit()
    hand.settle()
    assert second.held.num_host_tokens == 6
    hand.end(other)
    hand.end(first)
    assert hand.cache.onboard(second.held) is None
    hand.settle()
    hand.plan(second)
    hand.commit()  # reads, and checks, what it loaded
    hand.end(second)


def test_c03_a_claim_on_the_host_that_does_not_fit_is_given_back() -> None:
    """C03: a refused load changes nothing, and the claim gives back both tiers."""
    hand = tiered(device=3)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.settle()
    busy = hand.run(KEY, [31, 32, 33])
    push_out(hand)
    before = hand.cache.stats()
    sequence = hand.claim(KEY, [1, 2, 3, 4, 5])
    assert sequence.held.num_host_tokens == 4
    claimed = hand.cache.stats()
    assert hand.cache.onboard(sequence.held) is Refusal.NO_ROOM
    assert hand.cache.stats() == claimed != before
    hand.end(sequence, Ending.DROPPED)
    audit(hand.cache)
    assert hand.cache.stats() == before
    hand.end(busy)


def test_h07_a_finished_write_back_counts_as_use_of_the_host_page() -> None:
    """H07: what has just arrived is not the first to go."""
    hand = tiered(device=16, host=4)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.serve(KEY, [11, 12, 13, 14, 15])
    hand.settle()
    hand.serve(KEY, [1, 2, 3, 4, 5])  # used again: now the other one is the oldest
    hand.serve(KEY, [21, 22, 23, 24, 25])
    hand.settle()
    pages = {path[0][1] for plane, path in resident(hand.cache) if plane == 1}
    assert pages == {path_of(KEY, [first, first + 1], 1, 2)[0][1] for first in (1, 21)}


def test_h07_what_arrived_on_the_host_last_is_not_the_first_to_go() -> None:
    """H07: the older prompt's copy takes longer; from when it ends its pages count as used on the
    host, and on the host alone."""
    hand = tiered(device=16, host=4)
    one, two, three = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [21, 22, 23, 24, 25]
    hand.serve(KEY, one)
    [slow] = hand.take_copies()
    hand.serve(KEY, two)
    hand.settle_all_but(slow)
    hand.acknowledge(slow)
    hand.serve(KEY, three)
    hand.settle()
    pages = {path[0][1] for plane, path in resident(hand.cache) if plane == 1}
    assert pages == {path_of(KEY, tokens, 1, 2)[0][1] for tokens in (one, three)}
    hand.cache.evictors[0].evict(2)
    assert hand.cache.lookup(KEY, ints(*one)).num_device_pages == 0
    assert hand.cache.lookup(KEY, ints(*two)).num_device_pages == 2


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("policy", [WriteBack.THROUGH, WriteBack.REUSED])
def test_h07_pages_and_states_of_one_request_are_acknowledged_together(
    order: list[int], policy: WriteBack
) -> None:
    """H07: till the last copy of what was handed over has ended, nothing of it is found on the host
    and both ends of all copies stay held; then everything that arrived is found at once."""
    hand = CacheHarness(
        *(Capacity(kind, 8, 8) for kind in (FULL_ATTENTION, window(4, 2), recurrent(3))),
        policies=CachePolicies(write_back=policy),
    )
    hand.serve(KEY, PROMPT)
    if policy is WriteBack.REUSED:
        hand.serve(KEY, PROMPT)
    copies = under_way(hand)
    assert [copy.family for copy in copies] == [0, 1, 2]
    on_either_tier = held(hand)
    assert all(on_either_tier)
    for number in order:
        assert {plane for plane, _ in resident(hand.cache)} == {0, 1, 2}
        assert held(hand) == on_either_tier
        hand.acknowledge(copies[number])
        audit(hand.cache)
    assert {plane for plane, _ in resident(hand.cache)} == {0, 1, 2, 3, 4, 5}
    assert held(hand) == [0] * 6
    push_out(hand)
    assert hand.serve(KEY, PROMPT) == 6


def test_h07_one_requests_copies_do_not_wait_for_anothers() -> None:
    """H07: two requests of one step; each hand-over ends when its own copies have."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), Capacity(recurrent(2), 8, 8))
    one, two = hand.claim(KEY, [1, 2, 3, 4]), hand.claim(KEY, [11, 12, 13, 14])
    hand.plan(one, two)
    hand.commit()
    hand.end(one)
    hand.end(two)
    copies = sorted(under_way(hand), key=lambda copy: copy.family)
    assert [copy.family for copy in copies] == [0, 0, 1, 1]
    for copy in copies[::2]:
        hand.acknowledge(copy)
    on_the_host = {path[0][1] for plane, path in resident(hand.cache) if plane > 1}
    assert on_the_host == {path_of(KEY, [1, 2], 1, 2)[0][1]}
    for copy in copies[1::2]:
        hand.acknowledge(copy)
    audit(hand.cache)
    assert held(hand) == [0] * 4


def test_h07_what_arrived_of_a_hand_over_is_found_though_the_rest_failed() -> None:
    """H07, H11: the state did not arrive; the pages did, and lead to where others resume."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), Capacity(recurrent(3), 8, 8))
    hand.serve(KEY, PROMPT)
    pages, state = under_way(hand)
    hand.acknowledge(state, [False])
    hand.acknowledge(pages)
    audit(hand.cache)
    assert {plane for plane, _ in resident(hand.cache)} == {0, 1, 2}
    assert held(hand) == [0] * 4


def test_h11_a_failed_write_back_publishes_nothing_and_frees_both_ends() -> None:
    """H11: wholly or in part; the device's copy stays findable and can be tried again."""
    for arrived in ([False, False, False], [True, False, True]):
        hand = tiered()
        hand.serve(KEY, PROMPT)
        [copy] = hand.take_copies()
        hand.acknowledge(copy, arrived)
        audit(hand.cache)
        assert held(hand) == [0, 0]
        assert on_host(hand) == sum(arrived)
        assert hand.cache.stats().total_failed_units == 3 - sum(arrived)
        assert hand.found(KEY, PROMPT) == 6
        push_out(hand)
        assert hand.found(KEY, PROMPT) == (2 if arrived[0] else 0)


def test_t08_a_load_that_fails_is_not_relied_on_and_not_found_again() -> None:
    """T08, T03: the lease says so; what could not be read from the host is a miss from now on."""
    hand = tiered()
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand)
    sequence = hand.claim(KEY, PROMPT)
    hand.cache.onboard(sequence.held)
    [copy] = hand.take_copies()
    hand.acknowledge(copy, [True, False, True])
    audit(hand.cache)
    assert sequence.held.is_ready
    assert sequence.held.has_failed
    hand.end(sequence, Ending.DROPPED)
    audit(hand.cache)
    assert held(hand) == [0, 0]
    assert hand.found(KEY, PROMPT) == 2
    assert hand.serve(KEY, PROMPT) == 2


@pytest.mark.parametrize("arrives", [True, False])
def test_t08_an_abort_during_load_back_leaks_nothing(arrives: bool) -> None:
    """T08: both ends stay pinned for the copy alone, and are let go when it ends."""
    hand = tiered(device=4)
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand)
    sequence = hand.claim(KEY, PROMPT)
    hand.cache.onboard(sequence.held)
    [copy] = hand.take_copies()
    hand.end(sequence, Ending.DROPPED)
    audit(hand.cache)
    assert held(hand) == [3, 3]
    assert not hand.plan(hand.claim(KEY, [31, 32, 33, 34])).parts
    hand.commit()
    hand.acknowledge(copy, [arrives] * 3)
    audit(hand.cache)
    assert hand.found(KEY, PROMPT) == (6 if arrives else 0)


def test_t08_an_abort_before_a_load_arrives_leaves_no_page_without_those_before_it() -> None:
    """T08: the device's part of the prefix is evicted between the abort and the arrival."""
    hand = tiered(device=4)
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand, keep=1)
    sequence = hand.claim(KEY, PROMPT)
    assert sequence.held.num_host_tokens == 4
    hand.cache.onboard(sequence.held)
    [copy] = hand.take_copies()
    hand.end(sequence, Ending.DROPPED)
    other = hand.claim(KEY, [31, 32, 33, 34])
    assert hand.plan(other).parts  # takes the one page without a holder
    hand.commit()
    hand.acknowledge(copy)
    audit(hand.cache)
    hand.end(other)
    hand.settle()
    assert hand.serve(KEY, PROMPT) == 6


def test_t08_a_load_that_arrives_in_part_leaves_no_page_without_those_before_it() -> None:
    """T08: the middle page is torn; the page after it is of no use on the device."""
    hand = tiered()
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand)
    sequence = hand.claim(KEY, PROMPT)
    hand.cache.onboard(sequence.held)
    [copy] = hand.take_copies()
    hand.end(sequence, Ending.DROPPED)
    hand.acknowledge(copy, [False, True, True])
    audit(hand.cache)
    hand.serve(KEY, PROMPT)


@pytest.mark.parametrize("first_prompt", [PROMPT[:3], PROMPT], ids=["above", "both"])
def test_t09_parts_of_what_a_request_loads_may_arrive_in_any_order(first_prompt: list[int]) -> None:
    """T09: a request waits for a page that another loads and for one of its own, which arrives
    first. Meanwhile a third request brought the page above it, or both, and ends. A page that the
    waiting request has found must not lie below a page without a holder."""
    hand = tiered()
    hand.serve(KEY, PROMPT[:5])
    hand.settle()
    push_out(hand)
    first, other, last = (hand.claim(KEY, p) for p in (first_prompt, PROMPT[:3], PROMPT[:5]))
    assert hand.cache.onboard(first.held) is None
    hand.settle()
    for waiting in (other, last):
        assert hand.cache.onboard(waiting.held) is None
    shared, own = hand.take_copies()
    assert (len(shared.source_units), len(own.source_units)) == (1, 1)
    hand.acknowledge(own)
    hand.end(first)
    audit(hand.cache)
    hand.acknowledge(shared)
    audit(hand.cache)
    assert last.held.is_ready
    hand.plan(last)
    hand.commit()  # reads, and checks, what was loaded
    for sequence in (other, last):
        hand.end(sequence)
    hand.settle()
    assert held(hand) == [0, 0]
    assert hand.found(KEY, PROMPT) == 4


def test_t09_a_page_that_arrives_before_the_one_above_it_is_not_lost_on_the_host() -> None:
    """T09, H02: a request waits for a page that another loads and for one of its own, which arrives
    first. It can't be found on the device yet, so its host copy stays: without it the tree would
    lose the page, with the window's unit that the request holds."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16, 16), Capacity(window(2, page_size=2), 16, 16)
    )  # fmt: skip
    hand.serve(KEY, PROMPT[:5])
    hand.settle()
    cache, (full, _, host, _) = hand.cache, hand.layout.planes
    cache.evictors[full.index].evict(2)
    other, last = (hand.claim(KEY, prompt) for prompt in (PROMPT[:3], PROMPT[:5]))
    for waiting in (other, last):
        assert cache.onboard(waiting.held) is None
    shared, own = hand.take_copies()
    hand.acknowledge(own)
    cache.evictors[host.index].evict(cache.index.pools[host.index].num_cached)
    audit(cache)
    assert hand.found(KEY, PROMPT[:5]) == 4
    assert not last.held.is_ready
    hand.acknowledge(shared)
    audit(cache)
    assert last.held.is_ready
    another = hand.claim(KEY, PROMPT[:5])
    assert another.held.is_ready  # both pages are found on the device at once
    hand.plan(last)
    hand.commit()
    for sequence in (other, last, another):
        hand.end(sequence)
    hand.settle()
    assert held(hand) == [0, 0, 0, 0]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_t09_pages_are_found_again_in_whatever_order_their_loads_end(
    order: tuple[int, ...],
) -> None:
    """T09: a request loads a page and is aborted; the device loses the page above it. The next
    request shares this load, and loads the page above and the one below."""
    hand = tiered()
    hand.serve(KEY, PROMPT)
    hand.settle()
    push_out(hand, keep=1)
    aborted = hand.claim(KEY, PROMPT[:5])
    assert hand.cache.onboard(aborted.held) is None
    hand.end(aborted, Ending.DROPPED)
    push_out(hand)
    waiting = hand.claim(KEY, PROMPT)
    assert hand.cache.onboard(waiting.held) is None
    copies = under_way(hand)
    assert len(copies) == len(order)
    host = hand.layout.host[0].index
    for which in order:
        assert not waiting.held.is_ready
        hand.acknowledge(copies[which])
        hand.cache.evictors[host].evict(hand.cache.index.pools[host].num_cached)
        audit(hand.cache)
        assert hand.found(KEY, PROMPT) == 6
    assert waiting.held.is_ready
    another = hand.claim(KEY, PROMPT)
    assert another.held.is_ready
    for sequence in (waiting, another):
        hand.end(sequence)
    assert held(hand) == [0, 0]


def test_p03_a_failed_step_leaves_nothing_on_the_device_behind_what_it_takes_back() -> None:
    """P03, T08: pages that a request loads arrive after pages that another request, which may not
    reuse them, is computing again. That step fails; the request that loaded continues unharmed."""
    hand = tiered()
    hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    hand.serve(KEY, [1, 2, 3, 4, 0, 0, 0])  # parts the run after its second page
    hand.settle()
    push_out(hand)
    loading = hand.claim(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hand.cache.onboard(loading.held) is None
    [copy] = hand.take_copies()
    again = hand.claim(KEY, [1, 2, 3, 4, 9], may_reuse=False)
    hand.plan(again)
    hand.acknowledge(copy)
    audit(hand.cache)
    assert hand.cache.lookup(KEY, ints(*PROMPT)).num_device_pages == 3
    assert hand.fail() == [again]
    audit(hand.cache)
    assert hand.cache.lookup(KEY, ints(*PROMPT)).num_device_pages == 0
    assert loading.held.is_ready
    hand.plan(loading)
    hand.commit()  # reads, and checks, what it loaded
    hand.end(loading)
    audit(hand.cache)


def test_t08_an_abort_during_write_back_leaks_nothing() -> None:
    """T08: the request goes, the copy goes on, and its page is found on the host."""
    hand = tiered()
    sequence = hand.run(KEY, PROMPT)
    [copy] = hand.take_copies()
    hand.end(sequence, Ending.DROPPED)
    assert held(hand) == [3, 3]
    hand.acknowledge(copy)
    assert held(hand) == [0, 0]
    assert on_host(hand) == 3


class TestPrefetch:
    """The cache's side of asking storage."""

    def warm(self, *capacities: Capacity) -> tuple[CacheHarness, CacheHarness]:
        """A server that has filled a storage tier, and a new one beside it."""
        policies = CachePolicies(uses_storage=True)
        old = CacheHarness(*capacities, policies=policies)
        old.serve(KEY, PROMPT)
        old.settle()
        assert old.storage
        return old, CacheHarness(*capacities, policies=policies, storage=old.storage)

    @pytest.mark.parametrize("mix", ["full", "window", "full+window", "full+state"])
    def test_t04_t06_a_new_server_finds_the_storage_tier_warm(self, mix: str) -> None:
        """T04, T06, T07: asked when the request is queued; what has arrived is loaded from the
        host like any other page."""
        kinds = {"full": FULL_ATTENTION, "window": window(4, 2), "state": recurrent(1)}
        _, new = self.warm(*(Capacity(kinds[name], 16, 16) for name in mix.split("+")))
        ticket = new.cache.prefetch(KEY, ints(*PROMPT))
        assert ticket is not None
        assert new.cache.has_transfers
        new.settle()
        assert ticket.is_done
        assert not new.cache.has_transfers
        assert new.serve(KEY, PROMPT) == 6
        assert held(new) == [0] * len(new.layout.planes)

    @pytest.mark.parametrize("num_states", [1, 2])
    def test_t06_states_come_back_where_the_host_has_fewer_units_than_the_prompt_has_pages(
        self, num_states: int
    ) -> None:
        """T06: pages first, then the newest states of those that storage has; for a longer
        prompt, too, of which storage has the beginning alone."""
        old, _ = self.warm(Capacity(FULL_ATTENTION, 16, 16), Capacity(recurrent(1), 16, 16))
        few = (Capacity(FULL_ATTENTION, 16, 16), Capacity(recurrent(1), 16, num_states))
        for prompt in (PROMPT, [*PROMPT, *range(30, 36)]):
            new = CacheHarness(*few, policies=CachePolicies(uses_storage=True), storage=old.storage)
            assert new.cache.prefetch(KEY, ints(*prompt)) is not None
            for _ in range(3):
                new.settle()
            assert not new.cache.has_transfers
            assert new.serve(KEY, prompt) == 6
            for _ in range(3):
                new.settle()
            assert held(new) == [0] * len(new.layout.planes)

    def test_t04_only_what_neither_device_nor_host_has_is_asked_for(self) -> None:
        """T04: nothing for a prompt that is all there."""
        old, new = self.warm(Capacity(FULL_ATTENTION, 16, 16))
        assert old.cache.prefetch(KEY, ints(*PROMPT)) is None
        new.serve(KEY, [1, 2, 3])
        new.settle()
        new.cache.prefetch(KEY, ints(*PROMPT))
        [copy] = new.take_copies()
        assert copy.source is Tier.STORAGE
        assert len(copy.hashes) == 2

    @pytest.mark.parametrize(
        ("arrived", "found"), [([True, True, False], 4), ([False, True, True], 0), ([False] * 3, 0)]
    )
    def test_t03_what_did_not_arrive_whole_is_a_miss(self, arrived: list[bool], found: int) -> None:
        """T03: and all that could be resumed only through it; the rest hits; nothing leaks."""
        _, new = self.warm(Capacity(FULL_ATTENTION, 16, 16))
        new.cache.prefetch(KEY, ints(*PROMPT))
        [copy] = new.take_copies()
        new.acknowledge(copy, arrived)
        audit(new.cache)
        assert held(new) == [0, 0]
        assert new.found(KEY, PROMPT) == found
        assert new.serve(KEY, PROMPT) == found

    def test_t03_t08_an_answer_is_dropped_where_an_output_took_the_place_of_its_path(self) -> None:
        """T03, T08: the pages before it were evicted while storage was asked, and the output of a
        request that began alike had grown as long; with its tokens the answer is wrong."""
        old, _ = self.warm(Capacity(FULL_ATTENTION, 16, 16))
        policies = CachePolicies(uses_storage=True, write_back=WriteBack.REUSED)
        capacity = Capacity(FULL_ATTENTION, 6, 16)
        new = CacheHarness(capacity, policies=policies, storage=old.storage)
        writing = new.run(KEY, PROMPT[:2])
        new.serve(KEY, [*PROMPT[:4], 9])
        ticket = new.cache.prefetch(KEY, ints(*PROMPT))
        assert ticket is not None
        assert ticket.first == 2
        [copy] = new.take_copies()
        new.serve(KEY, [8] * 9)
        assert new.found(KEY, PROMPT) == 2
        while len(writing.tokens) < 6:
            new.plan(writing)
            new.plan(writing)
            new.commit()
            new.commit()
        new.acknowledge(copy)
        audit(new.cache)
        assert new.found(KEY, [*writing.tokens[:4], *PROMPT[4:]]) == 4

    def test_t03_a_page_that_storage_has_in_part_is_resumed_as_far_as_families_allow(self) -> None:
        """T03, H02: the window's last page is missing in storage; full attention has it all."""
        capacities = (Capacity(FULL_ATTENTION, 16, 16), Capacity(window(3, 2), 16, 16))
        _, new = self.warm(*capacities)
        new.cache.prefetch(KEY, ints(*PROMPT))
        copies = new.take_copies()
        new.acknowledge(copies[0])
        new.acknowledge(copies[1], [True, True, False])
        audit(new.cache)
        assert new.found(KEY, PROMPT) == 4
        assert new.serve(KEY, PROMPT) == 4

    def test_t03_a_storage_that_knows_nothing_is_a_miss(self) -> None:
        """T03: no request is harmed, and every unit comes back."""
        policies = CachePolicies(uses_storage=True)
        hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
        assert hand.cache.prefetch(KEY, ints(*PROMPT)) is not None
        hand.settle()
        assert hand.serve(KEY, PROMPT) == 0

    def test_t04_a_full_host_asks_for_what_there_is_room_for(self) -> None:
        """T04: best effort: never more than the host can take, and held units stay."""
        _, new = self.warm(Capacity(FULL_ATTENTION, 16, 2))
        new.cache.prefetch(KEY, ints(*PROMPT))
        [copy] = new.take_copies()
        assert len(copy.hashes) == 2
        assert new.cache.prefetch(KEY, ints(9, 9, 9)) is None  # no room at all
        new.settle()
        assert new.found(KEY, PROMPT) == 4

    def test_t04_what_is_kept_is_not_evicted_until_it_is_let_go_of(self) -> None:
        """T04: others are refused its room, also by write-back; then it goes as all else does."""
        _, new = self.warm(Capacity(FULL_ATTENTION, 16, 4))
        new.cache.prefetch(KEY, ints(*PROMPT))
        new.settle()
        keep = new.cache.keep(KEY, ints(*PROMPT))
        assert held(new) == [0, 3]
        new.serve(KEY, [9, 9, 8, 8, 7, 7, 6])
        new.settle()
        assert new.found(KEY, PROMPT) == 6
        ticket = new.cache.prefetch(KEY, ints(5, 5, 5, 5, 5), Share.WHOLE)
        assert ticket is not None
        assert (ticket.refusal, held(new)) == (Refusal.NO_ROOM, [0, 3])
        new.cache.let_go(keep)
        assert held(new) == [0, 0]
        ticket = new.cache.prefetch(KEY, ints(5, 5, 5, 5, 5, 5, 5, 5, 5), Share.WHOLE)
        assert ticket is not None
        assert ticket.refusal is None
        new.settle()
        assert new.found(KEY, PROMPT) < 6

    def test_t04_n12_what_is_evicted_by_name_is_kept_for_nobody(self) -> None:
        """T04, N12: the room of an evicted namespace, or prompt, is free at once."""
        for by_prompt in (False, True):
            _, new = self.warm(Capacity(FULL_ATTENTION, 16, 4))
            new.cache.prefetch(KEY, ints(*PROMPT))
            new.settle()
            keep = new.cache.keep(KEY, ints(*PROMPT))
            if by_prompt:
                new.cache.evict_prefix(KEY, ints(*PROMPT))
            else:
                assert new.cache.evict_namespace(BASE).num_freed == (0, 3)
            audit(new.cache)
            assert held(new) == [0, 0]
            new.cache.let_go(keep)
            audit(new.cache)

    def test_n08_a_page_computed_meanwhile_is_not_replaced(self) -> None:
        """N08, P05: the request did not wait; what arrives late finds its place taken or fills the
        host's, in its own namespace."""
        _, new = self.warm(Capacity(FULL_ATTENTION, 16, 16))
        new.cache.prefetch(KEY, ints(*PROMPT))
        new.take_copies()
        assert new.serve(KEY, PROMPT) == 0
        new.settle()
        assert new.found(KEY, PROMPT) == 6
        assert new.found(PrefixKey(ADAPTER_A), PROMPT) == 0
        assert held(new) == [0, 0]


class Mirror:
    """A router that knows nothing but the events."""

    def __init__(self) -> None:
        self.pages: dict[Tier, dict[bytes, tuple[Owner, bytes, bytes | None]]] = {
            Tier.DEVICE: {}, Tier.HOST: {},
        }  # fmt: skip

    def take(self, hand: CacheHarness) -> None:
        for event in hand.cache.take_events():
            pages = self.pages[event.tier]
            if isinstance(event, PagesRemoved):
                for digest in event.hashes:
                    assert pages.pop(digest)[0] == (event.namespace, event.begin)
                continue
            assert isinstance(event, PagesStored)
            parent = event.parent
            size = len(event.tokens) // len(event.hashes)
            for i, digest in enumerate(event.hashes):
                assert digest not in pages, "stored twice"
                tokens = event.tokens[i * size : (i + 1) * size]
                pages[digest] = (Owner(event.namespace, event.begin), tokens, parent)
                parent = digest

    def paths(self, tier: Tier) -> set[Path]:
        """What the router believes can be found."""
        every = self.pages[Tier.DEVICE] | self.pages[Tier.HOST]

        def path(digest: bytes) -> Path:
            owner, tokens, parent = every[digest]
            return (*(path(parent) if parent is not None else ()), (owner, tokens))

        return {path(digest) for digest in self.pages[tier]}


@pytest.mark.parametrize("policy", list(WriteBack))
def test_k02_a_consumer_of_the_events_mirrors_the_index_exactly_on_each_tier(
    policy: WriteBack,
) -> None:
    """K02: stored minus removed is what is resident, after every request, eviction, failed copy,
    failed step and unload, tokens and parents included."""
    hand = CacheHarness(  # with room for a request beside four copies under way
        Capacity(FULL_ATTENTION, 16, 6), Capacity(window(4, 2), 16, 6),
        policies=CachePolicies(records_events=True, write_back=policy, low_water=0.3),
    )  # fmt: skip
    mirror = Mirror()

    def check() -> None:
        mirror.take(hand)
        now = resident(hand.cache)
        for tier, plane in ((Tier.DEVICE, 0), (Tier.HOST, 2)):
            assert mirror.paths(tier) == {path for p, path in now if p == plane}

    begins = [PrefixKey.activated(BASE, ADAPTER_A, begin, 2) for begin in (4, 3, 1)]
    keys = [KEY, PrefixKey(ADAPTER_A), *begins]
    for number in range(24):
        prompt = [1 + number % 2, 2, 3 + number % 3, 4, 5 + number % 5, 6, 7]
        sequence = hand.run(keys[number % 5], prompt, max_output=number % 3)
        check()
        hand.end(sequence)
        hand.take_copies()
        for index, (copy, _) in enumerate(list(hand.under_way.values())):
            arrived = [(index + place + number) % 4 > 0 for place in range(len(copy.target_units))]
            hand.acknowledge(copy, arrived)
            check()
        if number % 5 == 4:
            hand.plan(hand.claim(KEY, [40 + number, 1, 2, 3]))
            check()
            hand.fail()
            check()
        if number % 7 == 6:
            hand.cache.evict_namespace(ADAPTER_A)
            check()
    assert mirror.pages[Tier.DEVICE]
    for namespace in (BASE, ADAPTER_A):
        hand.cache.evict_namespace(namespace)
    check()
    assert mirror.pages == {Tier.DEVICE: {}, Tier.HOST: {}}


@pytest.mark.parametrize(("num_states_back", "found"), [(1, 6), (8, 6), (9, 0)])
def test_t06_older_states_are_asked_for_until_one_is_there(
    num_states_back: int, found: int
) -> None:
    """T06: a prompt shares pages with a stored one that has no state where they part. Of
    three units a question takes two, so four questions reach eight pages back."""
    stored = [*PROMPT[:6], *range(100, 120)]
    old = CacheHarness(
        Capacity(FULL_ATTENTION, 32, 32), Capacity(recurrent(100), 32, 32),
        policies=CachePolicies(uses_storage=True),
    )  # fmt: skip
    for prompt in (PROMPT, stored):
        old.serve(KEY, prompt)
        old.settle()
    few = (Capacity(FULL_ATTENTION, 32, 32), Capacity(recurrent(100), 32, 3))
    new = CacheHarness(*few, policies=CachePolicies(uses_storage=True), storage=old.storage)
    asked = [*stored[: 6 + 2 * (num_states_back - 1)], *range(200, 204)]
    ticket = new.cache.prefetch(KEY, ints(*asked))
    assert ticket is not None
    new.settle()
    assert ticket.is_done
    assert new.serve(KEY, asked) == found
    new.settle()
    assert held(new) == [0] * len(new.layout.planes)
