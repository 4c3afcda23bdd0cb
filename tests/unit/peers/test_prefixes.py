"""What other engines' cache tests check (vLLM's prefix caching and hybrid managers, SGLang's radix,
window and mamba trees), asked of ours. Scenarios only; docs/coming-from.md explains differences."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import Namespace, Tier
from tests.helpers.cache_harness import (
    ADAPTER_A,
    ADAPTER_B,
    BASE,
    CacheHarness,
    Path,
    ints,
    longest,
    recurrent,
    resident,
    window,
)

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def full(num_pages: int = 16, num_host: int = 0, **policies: bool) -> CacheHarness:
    return CacheHarness(
        Capacity(FULL_ATTENTION, num_pages, num_host), policies=CachePolicies(**policies)
    )


def counts(hand: CacheHarness) -> list[tuple[int, int, int]]:
    """(free, cached, held) of each plane."""
    return [(p.num_free, p.num_cached, p.num_held) for p in hand.cache.stats().planes]


# Hits


@pytest.mark.parametrize("length", range(1, 12))
def test_whole_pages_are_found_and_at_least_one_token_is_left_to_compute(length: int) -> None:
    """vLLM, SGLang: a prompt that is cached whole still needs logits for its last token."""
    hand = full()
    prompt = list(range(1, length + 1))
    assert hand.serve(KEY, prompt) == 0
    assert hand.serve(KEY, prompt) == (length - 1) // 2 * 2


def test_a_prompt_that_parts_in_the_middle_of_a_page_finds_the_pages_before() -> None:
    hand = full()
    hand.serve(KEY, PROMPT)
    assert hand.found(KEY, [1, 2, 3, 4, 5, 7, 7, 7, 7]) == 4
    assert hand.found(KEY, [1, 3, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_what_follows_decides_nothing_about_what_was_before() -> None:
    """SGLang: splitting a node changes nothing of what is found through it."""
    hand = full(64)
    ends = ([5, 6, 7, 8], [5, 6, 9, 9], [5, 6, 7, 9], [8, 8, 8, 8])
    for end in ends:
        hand.serve(KEY, [1, 2, 3, 4, *end, 0])
    for end in ends:
        assert hand.found(KEY, [1, 2, 3, 4, *end, 0]) == 8


def test_the_same_tokens_at_another_place_are_another_page() -> None:
    """vLLM: a block's name is of all before it, not of its own tokens."""
    hand = full()
    hand.serve(KEY, [7, 7, 7, 7, 7, 7, 0])
    assert hand.found(KEY, [7, 7, 0, 7, 7, 7, 7]) == 2


def test_output_tokens_become_pages_as_they_are_computed() -> None:
    hand = full()
    sequence = hand.run(KEY, [1, 2, 3], max_output=5)
    known = list(sequence.tokens)
    assert hand.found(KEY, [*known, 0]) == sequence.num_computed // 2 * 2
    hand.end(sequence)
    assert hand.found(KEY, [*known, 0]) == sequence.num_computed // 2 * 2


def test_a_page_that_is_not_full_is_never_found() -> None:
    hand = full()
    hand.serve(KEY, [1, 2, 3])
    assert hand.found(KEY, [1, 2, 3, 4, 5]) == 2
    assert hand.cache.stats().planes[0].num_cached == 1


def test_with_caching_off_nothing_is_kept_and_nothing_found() -> None:
    hand = full(reuse=False)
    for _ in range(2):
        assert hand.serve(KEY, PROMPT) == 0
    assert counts(hand) == [(16, 0, 0)]


def test_a_request_that_must_not_reuse_computes_all_and_serves_others() -> None:
    """vLLM: prompt logprobs need every position, and what they computed is as good as any."""
    hand = full()
    hand.serve(KEY, PROMPT)
    again = hand.claim(KEY, PROMPT, may_reuse=False)
    assert again.held.num_cached_tokens == 0
    hand.plan(again)
    hand.commit()
    hand.end(again)
    assert hand.found(KEY, PROMPT) == 8
    audit(hand.cache)


@pytest.mark.parametrize("salts", [(None, ""), ("a", "b"), ("a", "A"), ("", " "), (None, "None")])
def test_salts_part_and_the_same_salt_joins(salts: tuple[str | None, str | None]) -> None:
    hand = full(64)
    one, other = (PrefixKey(Namespace(adapter=None, salt=salt)) for salt in salts)
    hand.serve(one, PROMPT)
    assert hand.found(other, PROMPT) == 0
    assert hand.found(one, PROMPT) == 8


def test_a_salt_and_an_adapter_part_together() -> None:
    hand = full(64)
    namespaces = [
        Namespace(adapter=adapter, salt=salt)
        for adapter in (None, ADAPTER_A.adapter, ADAPTER_B.adapter)
        for salt in (None, "x", "y")
    ]
    for namespace in namespaces:
        assert hand.serve(PrefixKey(namespace), PROMPT) == 0
    for namespace in namespaces:
        assert hand.found(PrefixKey(namespace), PROMPT) == 8


# Room


def test_a_hit_counts_as_use_and_a_look_does_not() -> None:
    hand = full(8)
    hand.serve(KEY, [1, 1, 1, 1, 0])
    hand.serve(KEY, [2, 2, 2, 2, 0])
    hand.found(KEY, [1, 1, 1, 1, 0])
    hand.found(KEY, [2, 2, 2, 2, 0])
    hand.serve(KEY, [1, 1, 1, 1, 5])
    hand.serve(KEY, [3] * 9)
    assert hand.found(KEY, [1, 1, 1, 1, 0]) == 4
    assert hand.found(KEY, [2, 2, 2, 2, 0]) < 4


def test_tails_go_before_what_leads_to_them() -> None:
    hand = full(8)
    hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0])
    hand.serve(KEY, [7, 7, 7, 7, 7, 7, 0])
    left = hand.found(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0])
    assert 0 < left < 10


def test_a_page_that_was_given_to_another_is_not_found_under_its_old_tokens() -> None:
    hand = full(4)
    hand.serve(KEY, [1, 2, 3, 4, 5, 6, 0])
    hand.serve(KEY, [9, 9, 9, 9, 9, 9, 0])
    assert hand.found(KEY, [1, 2, 3, 4, 5, 6, 0]) == 0
    assert hand.serve(KEY, [9, 9, 9, 9, 9, 9, 0]) == 6


def test_what_a_request_has_found_is_not_evicted_to_make_its_own_room() -> None:
    hand = full(6)
    hand.serve(KEY, [1, 2, 3, 4, 0])
    hand.serve(KEY, [8, 8, 8, 8, 0])
    sequence = hand.run(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0])
    assert sequence.held.num_cached_tokens == 4
    hand.end(sequence)


def test_found_pages_do_not_count_as_room_for_the_rest() -> None:
    """vLLM: computed blocks sit in the free queue, and must not be counted twice."""
    hand = full(6)
    hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    holder = hand.run(KEY, [9, 9, 9])
    wanted = hand.claim(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 4, 4, 4])
    assert not hand.plan(wanted).parts
    hand.commit()
    hand.end(wanted, Ending.DROPPED)
    hand.end(holder)
    audit(hand.cache)
    assert counts(hand)[0][2] == 0


def test_a_refusal_changes_no_count() -> None:
    hand = full(4)
    holder = hand.run(KEY, [1, 2, 3, 4, 5])
    before = counts(hand)
    wanted = hand.claim(KEY, [6] * 8)
    got = hand.cache.extend(wanted.held, 0, 8, hand.plan().step_id)
    assert isinstance(got, Refusal)
    hand.end(wanted, Ending.DROPPED)
    assert counts(hand) == before
    hand.commit()
    hand.end(holder)


def test_held_cached_and_free_add_up_through_everything() -> None:
    """SGLang: evictable and protected sizes, at every moment."""
    hand, rng = full(12), random.Random(3)
    open_ones = []
    for _ in range(200):
        if open_ones and rng.random() < 0.5:
            hand.end(open_ones.pop(rng.randrange(len(open_ones))))
        else:
            sequence = hand.claim(KEY, [rng.randrange(3) for _ in range(rng.randint(1, 9))])
            if hand.plan(sequence).parts:
                open_ones.append(sequence)
            else:
                hand.end(sequence, Ending.DROPPED)
            hand.commit()
        audit(hand.cache)
        assert sum(counts(hand)[0]) == 12
    for sequence in open_ones:
        hand.end(sequence)
    assert counts(hand)[0][2] == 0


def test_two_that_compute_one_page_leave_one_to_find_and_lose_none() -> None:
    hand = full()
    one = hand.claim(KEY, PROMPT, may_reuse=False)
    other = hand.claim(KEY, PROMPT, may_reuse=False)
    hand.plan(one, other)
    hand.commit()
    hand.end(one)
    assert hand.found(KEY, PROMPT) == 8
    hand.end(other)
    assert counts(hand) == [(12, 4, 0)]


def test_a_shared_page_stays_until_the_last_who_holds_it_ends() -> None:
    hand = full(6)
    one = hand.run(KEY, [1, 2, 3, 4, 5])
    other = hand.run(KEY, [1, 2, 3, 4, 6])
    hand.end(one)
    hand.serve(KEY, [9, 9])
    assert hand.found(KEY, [1, 2, 3, 4, 0]) == 4
    assert counts(hand)[0][2] >= 2
    hand.end(other)
    assert counts(hand)[0][2] == 0


# Events


def test_the_first_page_has_no_parent_and_each_other_its_own() -> None:
    hand = full(records_events=True)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.serve(KEY, [1, 2, 3, 4, 6, 7, 8])
    stored = [event for event in hand.cache.take_events() if isinstance(event, PagesStored)]
    assert stored[0].parent is None
    known = {None}
    for event in stored:
        assert event.parent in known
        known.update(event.hashes)


def test_a_hit_says_nothing_and_an_eviction_names_each_page_once() -> None:
    hand = full(6, records_events=True)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.cache.take_events()
    hand.serve(KEY, [1, 2, 3, 4, 5])
    assert hand.cache.take_events() == []
    hand.serve(KEY, [8] * 11)
    removed = [e for e in hand.cache.take_events() if isinstance(e, PagesRemoved)]
    hashes = [name for event in removed for name in event.hashes]
    assert len(hashes) == len(set(hashes)) == 2


def test_events_of_an_adapter_carry_it() -> None:
    hand = full(records_events=True)
    hand.serve(PrefixKey(ADAPTER_A), [1, 2, 3, 4, 5])
    events = hand.cache.take_events()
    assert {event.namespace for event in events} == {ADAPTER_A}
    assert {event.tier for event in events} == {Tier.DEVICE}


# Windows


def windowed(size: int = 4, num_pages: int = 16) -> CacheHarness:
    return CacheHarness(Capacity(FULL_ATTENTION, num_pages), Capacity(window(size, 2), num_pages))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8])
def test_a_running_request_holds_no_more_than_its_window(size: int) -> None:
    """vLLM: blocks that the window has left are given back while the request continues."""
    hand = windowed(size, 32)
    sequence = hand.run(KEY, [1, 2, 3], max_output=30)
    held = counts(hand)[1][2]
    assert held <= -(-(size - 1) // 2) + 2
    hand.end(sequence)
    audit(hand.cache)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_window_is_resumed_from_without_what_it_cannot_see(size: int) -> None:
    hand = windowed(size, 32)
    prompt = list(range(1, 14))
    hand.serve(KEY, prompt)
    hand.cache.evictors[1].evict(counts(hand)[1][1] - -(-(size - 1) // 2))
    found = hand.found(KEY, [*prompt, 0])
    assert found > 0
    hand.serve(KEY, [*prompt, 0])  # reads what the window sees, and checks it


def test_where_the_window_went_the_full_pages_alone_are_no_hit() -> None:
    """SGLang's tombstones: full attention is there, and can't be resumed from."""
    hand = windowed()
    hand.serve(KEY, PROMPT)
    hand.cache.evictors[1].evict(counts(hand)[1][1])
    assert hand.found(KEY, PROMPT) == 0
    assert counts(hand)[0][1] == 4, "the pages are still there"


def test_a_window_that_went_is_there_again_once_somebody_computed_it() -> None:
    """SGLang: a tombstone is filled again, and the full pages are not stored twice."""
    hand = windowed()
    hand.serve(KEY, PROMPT)
    hand.cache.evictors[1].evict(counts(hand)[1][1])
    hand.serve(KEY, PROMPT)
    assert hand.found(KEY, PROMPT) == 8
    assert counts(hand)[0][1] == 4


def test_window_pages_of_a_launched_step_are_not_given_away_before_it_is_done() -> None:
    """vLLM: freeing by what is planned would let another write what a launched step still reads."""
    hand = windowed(3, 12)
    one = hand.run(KEY, [1, 2, 3, 4, 5])
    other = hand.run(KEY, [9, 8, 7, 6, 5])
    for _ in range(8):
        hand.plan(one, other)
        hand.plan(one, other)  # a step ahead
        hand.commit()  # reads, and checks, what each step sees
        hand.commit()
    audit(hand.cache)
    hand.end(one)
    hand.end(other)


# States


def now_has(hand: CacheHarness) -> Callable[[int, Path], bool]:
    units = resident(hand.cache)
    return lambda plane, path: (plane, path) in units


def stateful(interval: int = 1, num_states: int = 8) -> CacheHarness:
    return CacheHarness(Capacity(FULL_ATTENTION, 32), Capacity(recurrent(interval), num_states))


def test_two_that_resume_from_one_state_do_not_share_the_one_they_work_on() -> None:
    """SGLang copies on write: the checkpoint must be as it was for the third."""
    hand = stateful()
    hand.serve(KEY, [1, 2, 3, 4, 5])
    one = hand.run(KEY, [1, 2, 3, 4, 6, 6, 6])
    other = hand.run(KEY, [1, 2, 3, 4, 7, 7, 7])
    assert one.held.num_cached_tokens == other.held.num_cached_tokens == 4
    hand.end(one)
    hand.end(other)
    assert hand.serve(KEY, [1, 2, 3, 4, 8]) == 4


def test_without_the_deepest_state_the_next_higher_one_serves() -> None:
    """As states go one by one, in whatever order, what is found is what trying each would find."""
    hand, prompt = stateful(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for length in (3, 5, 7, 9):
        hand.serve(KEY, prompt[:length])
    found = [hand.found(KEY, prompt)]
    while counts(hand)[1][1]:
        hand.cache.evictors[1].evict(1)
        by_trying = longest(hand.layout, KEY, prompt, now_has(hand))
        assert hand.found(KEY, prompt) == by_trying * 2
        found.append(by_trying * 2)
    assert found[0] == 8
    assert found[-1] == 0


def test_without_any_state_nothing_is_found_and_pages_are_not_computed_into_twice() -> None:
    hand = stateful()
    hand.serve(KEY, PROMPT)
    hand.cache.evictors[1].evict(counts(hand)[1][1])
    assert hand.found(KEY, PROMPT) == 0
    num_pages = counts(hand)[0][1]
    hand.serve(KEY, PROMPT)
    assert counts(hand)[0][1] == num_pages


def test_with_no_state_to_spare_requests_still_run() -> None:
    """SGLang: a full state pool must not stop any request; there is just nothing to resume from."""
    hand = stateful(num_states=2)
    one = hand.run(KEY, [1, 2, 3, 4, 5])
    other = hand.run(KEY, [9, 8, 7, 6, 5])
    hand.end(one)
    hand.end(other)
    audit(hand.cache)


@pytest.mark.parametrize("length", [15, 16, 17, 30, 31, 32, 33])
def test_a_shared_head_of_any_length_is_found_by_the_third_who_comes(length: int) -> None:
    """vLLM #45238: 1500 shared tokens hit nothing where 1600 did. The second request shows where
    prompts part; from there the third resumes."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 200), Capacity(recurrent(8), 40))
    head = [1 + i % 40 for i in range(length)]
    for number in range(3):
        found = hand.serve(KEY, [*head, 50 + number, 60 + number, 70 + number])
    assert found == length // 2 * 2


def test_a_state_that_only_the_host_has_is_no_reason_to_throw_pages_away() -> None:
    """vLLM #52773: a hit in full attention was dropped although the store had the state."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 32, 32), Capacity(recurrent(), 8, 16))
    hand.serve(KEY, PROMPT)
    hand.settle()
    hand.cache.evictors[1].evict(counts(hand)[1][1])
    sequence = hand.run(KEY, PROMPT)
    assert sequence.held.num_cached_tokens == 8
    hand.end(sequence)
    hand.settle()
    audit(hand.cache)


def test_resuming_is_no_use_of_the_states_before() -> None:
    """SGLang #31643, #31648: a hit made every state of its path the newest. Whole conversations
    were evicted instead of states that no request would resume from (26 of these 28 turns found
    nothing). Four conversations keep their newest states in room for those, a working one and the
    one being saved."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 400), Capacity(recurrent(2), 4 + 2))
    talks = [[100 * (1 + talk) + i for i in range(5)] for talk in range(4)]
    for turn in range(8):
        for talk in talks:
            found = hand.serve(KEY, talk)
            assert turn == 0 or found == (len(talk) - 4 - 1) // 2 * 2
            talk += [1000 * (turn + 1) + talk[0] + i for i in range(4)]


# Tiers


def test_what_the_device_has_is_used_and_the_host_gives_the_rest() -> None:
    """vLLM: local and external hits of one request add up."""
    hand = full(8, num_host=16)
    hand.serve(KEY, PROMPT)
    hand.settle()
    hand.cache.evictors[0].evict(2)
    sequence = hand.run(KEY, PROMPT)
    assert sequence.held.num_cached_tokens == 8
    hand.end(sequence)
    hand.settle()


def test_after_device_and_host_lost_it_a_prefix_is_computed_again() -> None:
    hand = full(8, num_host=8)
    hand.serve(KEY, PROMPT)
    hand.settle()
    for evictor, (_, num_cached, _) in zip(hand.cache.evictors, counts(hand), strict=True):
        evictor.evict(num_cached)
    assert hand.serve(KEY, PROMPT) == 0
    hand.settle()


def test_one_turn_on_the_host_and_the_next_on_the_device_are_one_prefix() -> None:
    hand = full(12, num_host=12)
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.settle()
    hand.cache.evictors[0].evict(counts(hand)[0][1])
    assert hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    hand.settle()
    assert hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_the_last_token_alone_is_never_what_is_claimed() -> None:
    hand = full()
    hand.serve(KEY, [1, 2, 3, 4, 5, 6])
    match = hand.cache.lookup(KEY, ints(1, 2, 3, 4))
    assert match.num_pages == 1
