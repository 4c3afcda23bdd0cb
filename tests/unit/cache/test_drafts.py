"""Speculative tokens at the cache's boundary (P11): drafts are computed, and some are taken."""

from __future__ import annotations

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import Capacity
from manyroots.ids import StepId
from tests.helpers.cache_harness import (
    BASE,
    CacheHarness,
    Sequence,
    ints,
    path_of,
    recurrent,
    resident,
    window,
)

KEY = PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5]


def right_drafts(hand: CacheHarness, sequence: Sequence, count: int) -> list[int]:
    """What the model will say next."""
    ahead = Sequence(sequence.key, list(sequence.tokens), 0, None, 0, 0)
    for _ in range(count):
        ahead.tokens.append(hand.next_token(ahead))
    return ahead.tokens[len(sequence.tokens) :]


def drafts(hand: CacheHarness, sequence: Sequence, num_right: int, num_wrong: int) -> list[int]:
    right = right_drafts(hand, sequence, num_right + 1)
    return [*right[:-1], *[1 - right[-1]] * num_wrong]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_p11_only_accepted_tokens_are_published(num_right: int, page_size: int) -> None:
    """P11: whole pages of what was right, when the step is done; nothing of the rest, ever."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 32), page_size=page_size)
    sequence = hand.run(KEY, PROMPT)
    known = len(sequence.tokens)
    guesses = drafts(hand, sequence, num_right, 5 - num_right)
    hand.guess(sequence, guesses)
    wrong = [*sequence.tokens, *guesses]
    assert hand.found(KEY, [*wrong, 0]) == known // page_size * page_size
    hand.commit()
    audit(hand.cache)
    assert sequence.num_computed == known + num_right
    pages = (known + num_right) // page_size
    names = {path_of(KEY, sequence.tokens, n, page_size) for n in range(1, pages + 1)}
    assert {path for _, path in resident(hand.cache)} == names
    hand.end(sequence)
    audit(hand.cache)


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_p11_a_lease_goes_on_from_what_was_accepted_with_other_tokens(
    num_right: int, size: int
) -> None:
    """P11: beside a window of any size, which gives nothing back that the tokens after the accepted
    ones read. Every read is checked, here and where requests reuse the pages."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 32), Capacity(window(size, 2), 32))
    sequence = hand.run(KEY, PROMPT)
    for _ in range(4):
        hand.guess(sequence, drafts(hand, sequence, num_right, 6 - num_right))
        hand.commit()
        audit(hand.cache)
    hand.plan(sequence)
    hand.commit()
    said = sequence.tokens
    hand.end(sequence)
    alone = CacheHarness(Capacity(FULL_ATTENTION, 64))
    assert alone.run(KEY, PROMPT, max_output=len(said) - len(PROMPT) - 1).tokens == said
    assert hand.serve(KEY, said, max_output=2) == (len(said) - 1) // 2 * 2


def test_p11_units_after_the_accepted_tokens_are_given_back() -> None:
    """P11, V03: they are free as soon as the result is processed; the table ends before them."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 8))
    sequence = hand.run(KEY, PROMPT)
    hand.guess(sequence, drafts(hand, sequence, 0, 6))
    table = sequence.held.tables[0].tolist()
    assert len(table) == 6
    hand.commit()
    assert sequence.num_computed == 6
    assert sequence.held.tables[0].tolist() == table[:3]
    assert hand.cache.stats().planes[0].num_held == 3
    hand.guess(sequence, drafts(hand, sequence, 4, 1))
    hand.commit()
    assert len(sequence.held.tables[0]) == -(-sequence.num_computed // 2)
    hand.end(sequence)
    audit(hand.cache)
    assert hand.cache.stats().planes[0].num_held == 0


@pytest.mark.parametrize("mix", [["state"], ["full", "state"], ["full", "window", "state"]])
def test_p11_a_draft_that_would_save_a_state_is_refused(mix: list[str]) -> None:
    """P11, C05, V04: an outcome of its own, and nothing has changed; the step without drafts works.
    So no state after rejected drafts can be cached (vLLM #48375, #57128)."""
    kinds = {"full": FULL_ATTENTION, "window": window(4, 2), "state": recurrent(1)}
    hand = CacheHarness(*(Capacity(kinds[name], 16) for name in mix))
    sequence = hand.run(KEY, PROMPT)
    before = hand.cache.stats()
    refusal = hand.cache.draft(sequence.held, 5, 6, 8, StepId(99))
    assert refusal is Refusal.CANNOT_REWIND
    assert hand.cache.stats() == before
    hand.plan(sequence)
    hand.commit()
    hand.end(sequence)


def test_p11_drafts_without_room_are_refused_and_change_nothing() -> None:
    hand = CacheHarness(Capacity(FULL_ATTENTION, 3))
    sequence = hand.run(KEY, PROMPT)
    assert hand.cache.draft(sequence.held, 5, 6, 9, StepId(99)) is Refusal.NO_ROOM
    assert hand.plan(sequence).parts  # as if nothing had been asked
    hand.commit()
    hand.end(sequence)


def test_p11_a_lease_grows_no_further_before_its_drafts_are_settled() -> None:
    """P11: how far it is, and so what a window may give back, is not known."""
    hand = CacheHarness()
    sequence = hand.run(KEY, PROMPT)
    hand.guess(sequence, [0, 1])
    with pytest.raises(RuntimeError, match="drafts after token 6"):
        hand.cache.extend(sequence.held, 6, 7, StepId(99))
    hand.commit()
    hand.plan(sequence)
    hand.commit()
    hand.end(sequence)


@pytest.mark.parametrize("fails", [True, False])
def test_p11_a_request_that_ends_while_drafts_are_computed_leaves_nothing(fails: bool) -> None:
    hand = CacheHarness()
    sequence = hand.run(KEY, PROMPT)
    hand.guess(sequence, [0, 1, 0, 1])
    if fails:
        assert hand.fail() == [sequence]
    else:
        hand.end(sequence, Ending.DROPPED)
        hand.commit()
    audit(hand.cache)
    assert hand.cache.stats().planes[0].num_held == 0
    assert hand.found(KEY, [*PROMPT, 0]) == 4
    assert hand.cache.lookup(KEY, ints(*sequence.tokens, 0, 1, 0, 1)).num_pages <= 3
