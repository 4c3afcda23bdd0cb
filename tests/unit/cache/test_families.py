"""Families with one interface: what can be resumed from, what is kept of it, and what it costs."""

from __future__ import annotations

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.matching import Limit
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import StepId
from tests.helpers.cache_harness import (
    ADAPTER_A,
    BASE,
    CacheHarness,
    Path,
    ints,
    longest,
    path_of,
    recurrent,
    resident,
    window,
)

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def cached(hand: CacheHarness) -> list[int]:
    return [plane.num_cached for plane in hand.cache.stats().planes]


def evict(hand: CacheHarness, plane: int, pages: list[int]) -> None:
    """Take single units of the prompt's pages out of the index, as an eviction would."""
    for page in pages:
        path = path_of(KEY, PROMPT, page + 1, hand.page_size)
        node = next(
            node for node in hand.cache.index.tree.nodes()
            if node.first <= page < node.end
            and node.keys.startswith(path[node.first][1])
        )  # fmt: skip
        hand.cache.index.remove(node, plane, ints(page - node.first).astype("intp"))
    audit(hand.cache)


@pytest.mark.parametrize(
    ("plane", "holes", "found"),
    [
        (0, [], 8), (0, [3], 6), (0, [1], 2), (0, [0], 0),
        (1, [3], 6), (1, [2], 4), (1, [0], 8), (1, [0, 1, 2], 0),
        (2, [3], 6), (2, [3, 2], 4), (2, [0, 1], 8), (2, [0, 1, 2, 3], 0),
    ],
)  # fmt: skip
def test_h02_a_hit_is_the_longest_boundary_that_every_family_can_resume_from(
    plane: int, holes: list[int], found: int
) -> None:
    """H02: with holes in full attention (all before must be there), in a window of 4 tokens (the
    page before the boundary, and the one before that) and in the states (the one at it)."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16), Capacity(recurrent(1), 16)
    )
    hand.serve(KEY, PROMPT)
    evict(hand, plane, holes)
    now = resident(hand.cache)

    def has(plane: int, path: Path) -> bool:
        return (plane, path) in now

    assert longest(hand.layout, KEY, PROMPT, has) * 2 == hand.found(KEY, PROMPT)
    assert hand.found(KEY, PROMPT) == found
    hand.serve(KEY, PROMPT)  # reads, and checks, what it resumed from


def test_h02_the_reason_names_the_family_in_the_way() -> None:
    """H02, S07: a missing checkpoint, a window evicted, a cold index."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16), Capacity(recurrent(1), 16)
    )
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.COLD
    hand.serve(KEY, PROMPT)
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.NOTHING
    evict(hand, 2, [3])
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.CHECKPOINT
    hand.serve(KEY, PROMPT)
    evict(hand, 1, [3])
    assert hand.cache.lookup(KEY, ints(*PROMPT)).limit is Limit.WINDOW


def test_c06_with_several_windows_the_usable_prefix_is_the_smallest() -> None:
    """C06: the wide window lost a page that the narrow one does not need."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16), Capacity(window(3, 2), 16), Capacity(window(5, 2, "wide"), 16)
    )
    hand.serve(KEY, PROMPT)
    assert hand.found(KEY, PROMPT) == 8
    evict(hand, 2, [2])  # of use to boundaries 3 and 4 of the wide one
    assert hand.found(KEY, PROMPT) == 4
    evict(hand, 1, [1])
    assert hand.found(KEY, PROMPT) == 2
    hand.serve(KEY, PROMPT)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 9, 100])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_p07_a_window_publishes_and_matches_what_it_can_resume_from(
    size: int, page_size: int
) -> None:
    """P07: a second request resumes at the last whole page and reads only what is really there, one
    token before and after every page boundary."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    for length in range(1, len(tokens) + 1):
        hand = CacheHarness(
            Capacity(FULL_ATTENTION, 32), Capacity(window(size, page_size), 32), page_size=page_size
        )
        assert hand.serve(KEY, tokens[:length]) == 0
        whole = (length - 1) // page_size * page_size
        assert hand.serve(KEY, tokens[:length], max_output=6) == whole


def test_p07_a_request_holds_no_page_that_its_window_has_left() -> None:
    """P07: pages that the window has left go back, also while the request runs."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 32), Capacity(window(4, 2), 32))
    sequence = hand.run(KEY, PROMPT, max_output=9)
    assert sequence.num_computed == 18
    assert hand.plan(sequence).parts
    # Position 18 sees 15 to 17, on pages 7 and 8, and is itself on page 9.
    assert [plane.num_held for plane in hand.cache.stats().planes] == [10, 3]
    hand.commit()
    hand.end(sequence)


def test_p03_pages_are_published_at_a_chunks_end_at_the_prompts_and_while_decoding() -> None:
    """P03: each when its step commits, not before for a token that was not known."""
    hand = CacheHarness()
    sequence = hand.claim(KEY, [1, 2, 3, 4, 5])
    found = []
    for _ in range(6):
        hand.plan(sequence, most=2)
        hand.commit()
        found.append(hand.found(KEY, [*sequence.tokens, 0]))
    assert found == [2, 4, 4, 6, 6, 8]
    hand.plan(sequence)
    hand.plan(sequence)  # its token is not known yet: nothing can be published of this page
    assert hand.found(KEY, [*sequence.tokens, 0]) == 8
    hand.commit()
    hand.commit()
    assert hand.found(KEY, [*sequence.tokens, 0]) == 10


@pytest.mark.parametrize("mix", ["full", "full+window", "full+state", "window"])
def test_p03_a_failed_step_publishes_nothing_in_any_family(mix: str) -> None:
    """P03: not its pages, not its states, and no hole that it filled in older pages."""
    kinds = {"full": FULL_ATTENTION, "window": window(4, 2), "state": recurrent(1)}
    hand = CacheHarness(*(Capacity(kinds[name], 16) for name in mix.split("+")))
    hand.serve(KEY, [1, 2, 3, 4, 9])
    before = resident(hand.cache)
    sequence = hand.claim(KEY, PROMPT)
    hand.plan(sequence)
    assert set(resident(hand.cache)) > set(before)
    assert hand.fail() == [sequence]
    audit(hand.cache)
    assert resident(hand.cache) == before
    assert hand.cache.stats().planes[0].num_held == 0


def test_p03_a_failed_step_takes_out_only_what_it_put_into_older_pages() -> None:
    """P03: a request that may not reuse computes a page again whose window part was evicted."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16))
    hand.serve(KEY, PROMPT)
    evict(hand, 1, [3])
    before = resident(hand.cache)
    sequence = hand.claim(KEY, PROMPT)
    hand.plan(sequence)
    assert len(resident(hand.cache)) == len(before) + 1
    hand.fail()
    audit(hand.cache)
    assert resident(hand.cache) == before


def test_p10_a_skipped_publication_drops_its_checkpoint_without_leaking() -> None:
    """P10: the namespace is gone, or another request's state is there already."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(1), 8))
    one, two = hand.claim(KEY, PROMPT[:5]), hand.claim(KEY, PROMPT[:5])
    for _ in range(3):
        hand.plan(one, two)
        hand.commit()
    assert cached(hand)[1] + hand.cache.stats().planes[1].num_held == 4  # 2 states, 2 working
    hand.cache.evict_namespace(BASE)
    hand.plan(one, two)
    hand.commit()
    hand.end(one)
    hand.end(two)
    audit(hand.cache)
    assert [plane.num_free for plane in hand.cache.stats().planes] == [16, 8]


def test_p10_a_dropped_lease_drops_the_checkpoint_of_its_launched_step() -> None:
    """P10, T08: aborted between the plan and its result."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(1), 8))
    sequence = hand.claim(KEY, PROMPT)
    hand.plan(sequence)
    assert hand.cache.stats().planes[1].num_held == 2
    hand.end(sequence, Ending.DROPPED)
    hand.commit()
    audit(hand.cache)
    assert hand.cache.stats().planes[1].num_free == 8


def test_p03_p12_a_state_that_a_failed_step_put_behind_older_pages_is_taken_back() -> None:
    """P03, P12: announced by a request that has lost its row since; the pages stay."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(100), 8))
    hand.serve(KEY, [1, 2, 3, 4, 5, 6, 7])
    sequence = hand.claim(KEY, [1, 2, 3, 4, 9, 9, 9])
    assert sequence.held.num_cached_tokens == 0
    sequence.held.shared = 2
    hand.plan(sequence)
    found = hand.cache.lookup(KEY, ints(1, 2, 3, 4, 8, 8, 8))
    assert (found.num_pages, found.walk.depth) == (2, 2), "the next step may restore it"
    hand.end(sequence)
    hand.fail()
    audit(hand.cache)
    found = hand.cache.lookup(KEY, ints(1, 2, 3, 4, 8, 8, 8))
    assert (found.num_pages, found.walk.depth) == (0, 2)


@pytest.mark.parametrize("ending", Ending)
def test_p03_h05_a_failed_step_leaves_no_state_where_a_model_has_states_alone(
    ending: Ending,
) -> None:
    """P03, H05: no page says that the path is the failed step's. The request was aborted, or has
    lost its row, while the step ran."""
    hand = CacheHarness(Capacity(recurrent(1), 8))
    sequence = hand.claim(KEY, PROMPT[:5])
    hand.plan(sequence)
    assert hand.cache.lookup(KEY, ints(*PROMPT[:5])).num_pages, "the next step may restore it"
    hand.end(sequence, ending)
    hand.fail()
    audit(hand.cache)
    assert hand.cache.lookup(KEY, ints(*PROMPT[:5])).num_pages == 0
    assert cached(hand) == [0]


def test_h10_a_request_gets_by_with_one_copy_of_each_page_where_there_is_no_room_for_two() -> None:
    """H10: it holds the copy that the tree leads through beside its own; giving that one back, it
    is found by its own pages from its next one on. Else it could never use all the room alone."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 6), Capacity(recurrent(1), 8))
    one, two = hand.claim(KEY, PROMPT[:5]), hand.claim(KEY, PROMPT[:5])
    for _ in range(3):
        hand.plan(one, two)
        hand.commit()
    hand.end(one)
    pages = hand.cache.stats().planes[0]
    assert (pages.num_held, pages.num_free) == (5, 1)  # 3 of its own, 2 copies
    assert hand.cache.prefer_own(two.held)
    audit(hand.cache)
    pages = hand.cache.stats().planes[0]
    assert (pages.num_held, pages.num_free) == (3, 3)
    assert not hand.cache.prefer_own(two.held)
    while len(two.tokens) < 9:
        assert hand.plan(two).parts
        hand.commit()
    audit(hand.cache)
    assert hand.cache.lookup(KEY, ints(*two.tokens)).walk.depth == 4
    hand.end(two)
    audit(hand.cache)


def test_h04_a_request_is_credited_with_the_window_pages_it_gives_back() -> None:
    """H04: with no free window page left, a decode crosses a page by giving one back."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(window(3, 2), 3))
    sequence = hand.run(KEY, [1, 2, 3, 4, 5, 6], max_output=8)
    assert len(sequence.tokens) == 15
    other = hand.claim(KEY, [9, 9, 9, 9])
    assert not hand.cache.can_reach(other.held, 0, 6, 6)
    assert isinstance(hand.cache.extend(other.held, 0, 6, StepId(99)), Refusal)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_h04_room_for_each_step_is_room_for_a_long_prompt(
    page_size: int, size: int, most: int
) -> None:
    """H04: a prompt of many windows is computed, step by step, in no more pages than `can_reach`
    asks for; with a page less than the steps need, some step is refused."""
    family = window(size, page_size)
    needed = family.most_needed(most)
    prompt = list(range(1, 60))

    def steps(num_units: int) -> list[bool]:
        hand = CacheHarness(Capacity(family, num_units), page_size=page_size)
        sequence = hand.claim(KEY, prompt)
        is_granted = hand.cache.can_reach(sequence.held, 0, len(prompt) + 1, most)
        assert is_granted == (num_units >= needed)
        granted = []
        while sequence.num_computed < len(prompt):
            granted.append(bool(hand.plan(sequence, most=most).parts))
            hand.commit()
            if not granted[-1]:
                break
        audit(hand.cache)
        return granted

    assert all(steps(needed))
    fewest = next(count for count in range(1, needed + 1) if all(steps(count)))
    assert needed - fewest <= 1, "it asks for more than where in a page a step begins can cost"


def test_h04_there_is_no_credit_for_a_page_that_another_request_holds_too() -> None:
    """H04: giving it back makes no room; refused until the other has let go of it."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(window(3, 2), 4))
    hand.serve(KEY, [1, 2, 3, 4, 5])
    one, two = hand.claim(KEY, [1, 2, 3, 4, 5, 6, 7]), hand.claim(KEY, [1, 2, 3, 4, 5, 6, 7])
    hand.plan(one, most=2)
    hand.commit()
    other = hand.claim(KEY, [9, 9, 9, 9])
    assert hand.plan(other).parts
    hand.commit()
    before = hand.cache.stats()
    assert not hand.plan(one).parts
    assert hand.cache.stats() == before
    hand.commit()
    hand.end(two, Ending.DROPPED)
    assert hand.plan(one).parts
    hand.commit()
    audit(hand.cache)


def test_h04_one_budget_for_all_families_a_refusal_takes_nothing_of_any() -> None:
    """H04: enough pages but no state, or the other way round: refused whole."""
    for pages, states in [(2, 8), (16, 1)]:
        hand = CacheHarness(Capacity(FULL_ATTENTION, pages), Capacity(recurrent(9), states))
        first = hand.claim(KEY, [1, 2])
        hand.plan(first)
        second = hand.claim(KEY, [5, 6])
        before = hand.cache.stats()
        assert not hand.cache.can_reach(second.held, 0, 4, 4)
        assert isinstance(hand.cache.extend(second.held, 0, 4, StepId(9)), Refusal)
        assert hand.cache.stats() == before
        audit(hand.cache)


def test_h05_the_final_state_of_a_finished_output_is_saved_for_the_next_turn() -> None:
    """H05: the output ends within a page; the next turn hits the last whole page of the output,
    although no checkpoint interval falls there. A dropped request keeps none."""
    for ending, found in [(Ending.FINISHED, 8), (Ending.DROPPED, 4)]:
        hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(100), 8))
        sequence = hand.run(KEY, [1, 2, 3, 4, 5], max_output=4)
        tokens = sequence.tokens
        hand.end(sequence, ending)
        audit(hand.cache)
        assert hand.found(KEY, [*tokens, 7]) == found
        assert hand.serve(KEY, [*tokens, 7]) == found


def test_h05_a_state_whose_step_has_not_committed_is_not_saved() -> None:
    """H05, P03: released as finished while the step that saves it still runs."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(100), 8))
    sequence = hand.run(KEY, [1, 2, 3, 4, 5])
    hand.plan(sequence)  # fills page 2 and saves the state at its end
    assert hand.cache.stats().planes[1].num_held == 2
    hand.end(sequence)
    audit(hand.cache)
    assert {len(path) for plane, path in resident(hand.cache) if plane == 1} == {2}
    hand.commit()


def test_h06_a_request_goes_on_without_a_checkpoint_where_there_is_no_room() -> None:
    """H06: counted, never an error, and nothing is published in its place."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(1), 1))
    sequence = hand.run(KEY, PROMPT, max_output=3)
    assert hand.cache.stats().total_skipped_checkpoints >= 4
    hand.end(sequence)
    audit(hand.cache)
    assert hand.found(KEY, PROMPT) == 0
    assert hand.cache.stats().planes[1].num_free == 1


def test_h08_losing_a_page_takes_the_states_and_windows_beyond_it_along() -> None:
    """H08: nothing can resume through it, so nothing after it is kept."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16), Capacity(recurrent(1), 16)
    )
    hand.serve(KEY, PROMPT)
    assert cached(hand) == [4, 4, 4]
    evict(hand, 0, [2])
    assert cached(hand) == [2, 2, 2]
    assert hand.found(KEY, PROMPT) == 4


def test_h08_a_state_may_go_alone_and_the_pages_stay_usable() -> None:
    """H08: under pressure on states alone, pages stay, up to the states that are left."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 64), Capacity(recurrent(1), 6))
    hand.serve(KEY, PROMPT)
    assert cached(hand) == [4, 4]
    hand.serve(KEY, [21, 22, 23, 24, 25, 26, 27])
    full, states = hand.cache.stats().planes
    assert full.num_cached == 7
    assert states.num_cached <= 6
    found = hand.found(KEY, PROMPT)
    now = resident(hand.cache)
    assert found == 2 * longest(hand.layout, KEY, PROMPT, lambda p, path: (p, path) in now)
    assert sum(plane == 0 for plane, _ in now) == 7


@pytest.mark.parametrize("mix", ["full", "full+window", "full+state"])
def test_h09_making_room_never_evicts_what_the_request_resumes_from(mix: str) -> None:
    """H09: the found pages are the least recently used and all that could be evicted is needed."""
    kinds = {"full": FULL_ATTENTION, "window": window(4, 2), "state": recurrent(1)}
    units = {"full": 6, "window": 6, "state": 4}
    hand = CacheHarness(*(Capacity(kinds[name], units[name]) for name in mix.split("+")))
    hand.serve(KEY, [1, 2, 3, 4, 5])
    hand.serve(KEY, [21, 22, 23])
    sequence = hand.claim(KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert sequence.num_computed == 4
    while sequence.num_computed < 11:  # reads, and checks, what it resumed from
        assert hand.plan(sequence).parts
        audit(hand.cache)
        hand.commit()
    hand.end(sequence)


def stops(hand: CacheHarness, tokens: list[int], key: PrefixKey = KEY) -> list[int]:
    """Where the steps of a prompt end."""
    sequence = hand.claim(key, tokens)
    ends = []
    while sequence.num_computed < len(tokens):
        ends.append(hand.plan(sequence).parts[0].end)
        hand.commit()
    hand.end(sequence)
    return ends


def test_h12_checkpoints_are_taken_by_interval_at_the_prompts_end_and_where_prompts_part() -> None:
    """H12: so that a shared prefix of a hybrid model really hits."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 64), Capacity(recurrent(3), 32))
    assert stops(hand, PROMPT) == [6, 8, 9]
    shared = [1, 2, 3, 4]
    second = [*shared, 31, 32, 33, 34, 35, 36, 37]
    assert stops(hand, second) == [4, 6, 10, 11]  # parts from the first after page 2
    assert hand.found(KEY, [*shared, 50]) == 4
    assert stops(hand, [*shared, 51, 52, 53])[0] == 6
    states = {len(path) for plane, path in resident(hand.cache) if plane == 1}
    assert states == {2, 3, 4, 5}


def test_c05_a_chunk_that_passes_a_resumable_point_is_refused() -> None:
    """C05: told how far it may go, and nothing is taken."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16), Capacity(recurrent(2), 8))
    sequence = hand.claim(KEY, PROMPT)
    before = hand.cache.stats()
    assert hand.cache.clip(sequence.held, 0, 9) == 4
    with pytest.raises(ValueError, match="ask `clip`"):
        hand.cache.extend(sequence.held, 0, 5, StepId(1))
    assert hand.cache.stats() == before
    assert not isinstance(hand.cache.extend(sequence.held, 0, 3, StepId(1)), Refusal)
    assert hand.cache.clip(sequence.held, 3, 6) == 1
    hand.end(sequence, Ending.DROPPED)


def test_c04_reuse_and_miss_counts_are_the_requests_own() -> None:
    """C04: each lease knows what it found and where; totals count a request once, as it begins."""
    hand = CacheHarness()
    hand.serve(KEY, PROMPT)
    one, two = hand.claim(KEY, PROMPT), hand.claim(PrefixKey(ADAPTER_A), PROMPT)
    three = hand.claim(KEY, [1, 2, 3, 4, 0])
    assert [s.held.num_cached_tokens for s in (one, two, three)] == [8, 0, 4]
    assert hand.cache.stats().total_lookup_tokens == len(PROMPT)
    for sequence in (one, two):
        hand.cache.begin(sequence.held, len(sequence.tokens))
    hand.end(three, Ending.DROPPED)  # claimed, but never begun
    stats = hand.cache.stats()
    assert (stats.total_lookup_tokens, stats.total_hit_tokens) == (3 * len(PROMPT), 8)
    assert stats.total_host_hit_tokens == 0


def test_reuse_can_be_switched_off_for_every_family() -> None:
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16), Capacity(window(4, 2), 16), Capacity(recurrent(1), 4),
        policies=CachePolicies(reuse=False),
    )  # fmt: skip
    for _ in range(2):
        assert hand.serve(KEY, PROMPT, max_output=3) == 0
    assert resident(hand.cache) == {}
    assert [plane.num_free for plane in hand.cache.stats().planes] == [16, 16, 4]


def test_a_page_is_published_behind_its_own_tokens_whoever_took_its_parents_place() -> None:
    """One request's page is evicted after its window has left it, and another request lengthens the
    same leaf in its place. The first request's next page must not be found after the other's
    tokens."""
    hand = CacheHarness(Capacity(window(2, 2), 3), page_size=2)
    cache = hand.cache
    ours, theirs = [1, 1, 2, 2, 3, 3], [1, 1, 4, 4]
    one = cache.claim(KEY, ints(*ours), 6, may_reuse=True)

    def compute(begin: int, end: int) -> None:
        assert not isinstance(cache.extend(one, begin, end, StepId(end)), Refusal)

    compute(0, 2)
    cache.commit(one, ints(*ours), 2, StepId(2))
    other = cache.claim(KEY, ints(*theirs), 4, may_reuse=True)
    assert other.num_cached_tokens == 2
    compute(2, 4)
    cache.commit(one, ints(*ours), 4, StepId(4))
    compute(4, 5)
    compute(5, 6)  # the window has left its second page, and no request holds it
    assert not isinstance(cache.extend(other, 2, 4, StepId(7)), Refusal)
    cache.commit(other, ints(*theirs), 4, StepId(7))
    cache.commit(one, ints(*ours), 6, StepId(8))
    audit(cache)
    found = resident(cache)
    assert found[0, path_of(KEY, ours, 3, 2)] == one.tables[0][2]
    assert found[0, path_of(KEY, theirs, 2, 2)] == other.tables[0][1]
    assert len(found) == 3
