"""The facade: leases, announcements, failures and eviction, audited throughout."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.keys import PrefixKey
from manyroots.cache.lease import Lease
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies
from manyroots.ids import Namespace, StepId

BASE = PrefixKey(Namespace(adapter=None, salt=None))


def make(num_pages: int = 8, page_size: int = 2) -> PrefixCache:
    layout = CacheLayout.of(page_size, (Capacity(FULL_ATTENTION, num_pages),))
    return PrefixCache(layout, CachePolicies())


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def begin(cache: PrefixCache, prompt: np.ndarray) -> Lease | Refusal:
    """Claim and extend as a step that computes the whole prompt would."""
    lease = cache.claim(BASE, prompt, len(prompt), may_reuse=True)
    extension = cache.extend(lease, lease.num_cached_tokens, len(prompt), StepId(1))
    if isinstance(extension, Refusal):
        cache.release(lease, Ending.DROPPED)
        return extension
    return lease


def lease_of(cache: PrefixCache, prompt: np.ndarray) -> Lease:
    lease = begin(cache, prompt)
    assert isinstance(lease, Lease)
    return lease


def found(cache: PrefixCache, prompt: np.ndarray) -> int:
    return cache.lookup(BASE, prompt).num_pages * cache.page_size


def free(cache: PrefixCache) -> int:
    return cache.stats().planes[0].num_free


def test_a_lookup_changes_nothing() -> None:
    cache = make()
    lease = lease_of(cache, tokens(1, 2, 3, 4, 5))
    cache.announce(lease, tokens(1, 2, 3, 4, 5), 5, StepId(1))
    before = cache.stats()
    assert found(cache, tokens(1, 2, 3, 4, 9)) == 4
    assert found(cache, tokens(1, 2, 3, 4)) == 2  # one token is always left to compute
    assert found(cache, tokens(1, 2, 9, 9, 9)) == 2
    assert cache.stats() == before
    audit(cache)


def test_c03_a_claim_that_does_not_fit_is_given_back() -> None:
    """C03: a refusal leaves every count as it was."""
    cache = make(num_pages=4)
    prompt = tokens(1, 2, 3, 4, 5)
    cache.announce(lease_of(cache, prompt), prompt, 5, StepId(1))
    before = cache.stats()
    longer = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert begin(cache, longer) is Refusal.NO_ROOM
    assert cache.stats() == before
    audit(cache)


def test_a_lease_is_released_exactly_once() -> None:
    cache = make()
    lease = lease_of(cache, tokens(1, 2, 3))
    cache.release(lease, Ending.FINISHED)
    with pytest.raises(RuntimeError, match="released twice"):
        cache.release(lease, Ending.FINISHED)
    audit(cache)


def test_p04_held_pages_are_never_evicted() -> None:
    """P04: published pages are pinned while a request uses them."""
    cache = make(num_pages=5)
    held = lease_of(cache, tokens(1, 2, 3, 4))
    cache.announce(held, tokens(1, 2, 3, 4), 4, StepId(1))
    gone = lease_of(cache, tokens(7, 8, 9, 10, 11, 12))
    cache.announce(gone, tokens(7, 8, 9, 10, 11, 12), 6, StepId(1))
    cache.release(gone, Ending.FINISHED)
    assert isinstance(begin(cache, tokens(20, 21, 22, 23, 24, 25)), Lease)
    assert found(cache, tokens(1, 2, 3, 4, 0)) == 4
    assert found(cache, tokens(7, 8, 9)) == 0
    audit(cache)


def test_the_least_recently_used_tail_goes_first() -> None:
    cache = make(num_pages=6)
    for step, start in enumerate((1, 11, 21), 1):
        prompt = np.arange(start, start + 4, dtype=np.int32)
        lease = lease_of(cache, prompt)
        cache.announce(lease, prompt, 4, StepId(step))
        cache.release(lease, Ending.FINISHED)
    cache.release(
        lease_of(cache, tokens(1, 2, 3, 4, 5)), Ending.FINISHED
    )  # evicts one page, touches the first
    assert found(cache, tokens(11, 12, 13, 14, 0)) == 2
    assert found(cache, tokens(1, 2, 3, 4, 0)) == 4
    audit(cache)


def test_what_led_to_a_page_that_has_gone_was_used_with_it() -> None:
    """The use of a page counts for all that leads there, also once the page itself is lost."""
    cache = make(num_pages=4)
    for start in (1, 11):
        prompt = tokens(start, start + 1)
        lease = lease_of(cache, prompt)
        cache.announce(lease, prompt, 2, StepId(1))
        cache.release(lease, Ending.FINISHED)
    cache.commit_step(StepId(1))
    longer = lease_of(cache, tokens(1, 2, 3, 4))
    cache.release(lease_of(cache, tokens(11, 12, 13)), Ending.DROPPED)
    cache.announce(longer, tokens(1, 2, 3, 4), 4, StepId(2))
    cache.release(longer, Ending.DROPPED)
    cache.fail_step(StepId(2))
    assert isinstance(begin(cache, tokens(20, 21, 22, 23, 24, 25)), Lease)
    assert found(cache, tokens(1, 2, 0)) == 2
    assert found(cache, tokens(11, 12, 0)) == 0
    audit(cache)


def test_p03_a_failed_step_takes_back_what_it_announced_and_all_below_it() -> None:
    """P03: also where the announced run has been split or lengthened since."""
    cache = make(num_pages=16)
    prompt = tokens(1, 2, 3, 4, 5, 6, 7)
    first = lease_of(cache, prompt)
    cache.announce(first, prompt, 7, StepId(1))
    other = tokens(1, 2, 3, 4, 9, 9, 9)
    second = lease_of(cache, other)
    assert second.num_cached_tokens == 4
    cache.announce(second, other, 7, StepId(1))
    audit(cache)
    cache.release(first, Ending.FINISHED)
    cache.release(second, Ending.FINISHED)
    cache.fail_step(StepId(1))
    audit(cache)
    assert free(cache) == 16
    assert found(cache, prompt) == 0


def test_a_committed_step_survives_the_failure_of_the_next() -> None:
    cache = make(num_pages=16)
    prompt = tokens(1, 2, 3, 4, 5, 6, 7, 8)
    lease = lease_of(cache, prompt)
    cache.announce(lease, prompt, 4, StepId(1))
    cache.announce(lease, prompt, 8, StepId(2))
    cache.commit_step(StepId(1))
    cache.fail_step(StepId(2))
    audit(cache)
    assert found(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9)) == 4
    longer = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    cache.extend(lease, 8, 10, StepId(3))
    cache.commit(lease, longer, 10, StepId(3))  # with the next page, what was taken out comes back
    audit(cache)
    assert found(cache, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)) == 10
    cache.release(lease, Ending.FINISHED)
    audit(cache)


def test_p05_a_copy_computed_twice_keeps_the_path_above_it_held() -> None:
    """P05: the second computer of a page holds the indexed copy too, so nothing is stranded."""
    cache = make(num_pages=6)
    prompt = tokens(1, 2, 3, 4)
    first, second = lease_of(cache, prompt), lease_of(cache, prompt)
    cache.commit(first, prompt, 4, StepId(1))
    longer = tokens(1, 2, 3, 4, 5, 6)
    assert cache.extend(second, 4, 6, StepId(2)) is not Refusal.NO_ROOM
    cache.commit(second, longer, 6, StepId(2))
    cache.release(first, Ending.FINISHED)
    audit(cache)
    assert isinstance(begin(cache, tokens(9, 9)), Lease)
    audit(cache)
    cache.release(second, Ending.FINISHED)
    audit(cache)
    assert found(cache, tokens(1, 2, 3, 4, 5, 6, 7)) == 6


def test_p08_publishing_within_a_step_is_the_familys_own_decision() -> None:
    """P08: a state is findable only once its step has committed; pages within the step."""
    state = RecurrentState("state", interval=1)
    layout = CacheLayout.of(2, (Capacity(FULL_ATTENTION, 8), Capacity(state, 4)))
    cache = PrefixCache(layout, CachePolicies())
    prompt = tokens(1, 2, 3)
    lease = cache.claim(BASE, prompt, 3, may_reuse=True)
    assert cache.clip(lease, 0, 3) == 2
    cache.extend(lease, 0, 2, StepId(1))
    cache.announce(lease, prompt, 2, StepId(1))
    assert cache.lookup(BASE, prompt).walk.depth == 1
    assert found(cache, prompt) == 0
    cache.commit_step(StepId(1))
    cache.commit(lease, prompt, 2, StepId(1))
    assert found(cache, prompt) == 2
    audit(cache)


def test_leases_that_find_one_path_share_a_hold_on_it() -> None:
    """Also if a third request makes it two nodes; the last lease frees the path, not the first."""
    cache = make(num_pages=16)
    prompt = tokens(1, 2, 3, 4, 5, 6, 7)
    owner = lease_of(cache, prompt)
    cache.announce(owner, prompt, 6, StepId(1))
    cache.commit_step(StepId(1))
    cache.release(owner, Ending.FINISHED)
    first, second = lease_of(cache, prompt), lease_of(cache, prompt)
    assert first.path_hold is second.path_hold is not None
    assert first.path_hold.num_leases == 2
    audit(cache)
    other = tokens(1, 2, 9, 9, 9)
    lease = lease_of(cache, other)
    assert lease.path_hold is not first.path_hold, "it found less"
    cache.announce(lease, other, 4, StepId(2))
    cache.commit_step(StepId(2))
    audit(cache)
    third = lease_of(cache, prompt)
    assert third.path_hold is first.path_hold
    for each, num_left in ((first, 2), (third, 1), (second, 0)):
        cache.release(each, Ending.FINISHED)
        assert first.path_hold.num_leases == num_left
        assert bool(cache.is_held(0, int(first.path_hold.units[2]))) == (num_left > 0)
        audit(cache)
    cache.release(lease, Ending.FINISHED)
    audit(cache)
    assert cache.stats().planes[0].num_held == 0


def test_a_question_for_room_is_no_use_of_the_prefix() -> None:
    cache = make(num_pages=4)
    uses = cache.num_uses
    assert cache.has_room_for(8)
    assert not cache.has_room_for(9)
    assert cache.num_uses == uses
