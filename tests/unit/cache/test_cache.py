"""The facade: leases, announcements, failures and eviction, audited throughout."""

from __future__ import annotations

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import Demand, PrefixCache, Refusal
from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.lease import Lease
from manyroots.ids import Namespace, StepId

BASE = Namespace(adapter=None, salt=None)


def make(num_pages: int = 8, page_size: int = 2) -> PrefixCache:
    return PrefixCache(FULL_ATTENTION, num_pages, page_size, reuse=True)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def reserve(cache: PrefixCache, prompt: np.ndarray, new: int = 100) -> Lease | Refusal:
    return cache.reserve(Demand(BASE, prompt, new, may_reuse=True, num_must_fit_tokens=0))


def lease_of(cache: PrefixCache, prompt: np.ndarray) -> Lease:
    lease = reserve(cache, prompt)
    assert isinstance(lease, Lease)
    return lease


def test_a_lookup_changes_nothing() -> None:
    cache = make()
    lease = lease_of(cache, tokens(1, 2, 3, 4, 5))
    cache.announce(lease, tokens(1, 2, 3, 4, 5), 5, StepId(1))
    before = cache.stats()
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 9)) == 4
    assert cache.lookup(BASE, tokens(1, 2, 3, 4)) == 2  # one token is always left to compute
    assert cache.lookup(BASE, tokens(1, 2, 9, 9, 9)) == 2
    assert cache.stats() == before
    audit(cache)


def test_c03_a_claim_that_does_not_fit_is_given_back() -> None:
    """C03: a refusal leaves every count as it was."""
    cache = make(num_pages=4)
    prompt = tokens(1, 2, 3, 4, 5)
    cache.announce(lease_of(cache, prompt), prompt, 5, StepId(1))
    before = cache.stats()
    longer = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert reserve(cache, longer) is Refusal.NO_ROOM
    assert cache.stats() == before
    audit(cache)


def test_a_lease_is_released_exactly_once() -> None:
    cache = make()
    lease = lease_of(cache, tokens(1, 2, 3))
    cache.release(lease)
    with pytest.raises(RuntimeError, match="released twice"):
        cache.release(lease)
    audit(cache)


def test_p04_held_pages_are_never_evicted() -> None:
    """P04: published pages are pinned while a request uses them."""
    cache = make(num_pages=5)
    held = lease_of(cache, tokens(1, 2, 3, 4))
    cache.announce(held, tokens(1, 2, 3, 4), 4, StepId(1))
    gone = lease_of(cache, tokens(7, 8, 9, 10, 11, 12))
    cache.announce(gone, tokens(7, 8, 9, 10, 11, 12), 6, StepId(1))
    cache.release(gone)
    assert isinstance(reserve(cache, tokens(20, 21, 22, 23, 24, 25)), Lease)
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 0)) == 4
    assert cache.lookup(BASE, tokens(7, 8, 9)) == 0
    audit(cache)


def test_the_least_recently_used_tail_goes_first() -> None:
    cache = make(num_pages=6)
    for step, start in enumerate((1, 11, 21), 1):
        prompt = np.arange(start, start + 4, dtype=np.int32)
        lease = lease_of(cache, prompt)
        cache.announce(lease, prompt, 4, StepId(step))
        cache.release(lease)
    cache.release(lease_of(cache, tokens(1, 2, 3, 4, 5)))  # evicts one page, touches the first
    assert cache.lookup(BASE, tokens(11, 12, 13, 14, 0)) == 2
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 0)) == 4
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
    cache.release(first)
    cache.release(second)
    cache.fail_step(StepId(1))
    audit(cache)
    assert cache.stats().num_free == 16
    assert cache.lookup(BASE, prompt) == 0


def test_a_committed_step_survives_the_failure_of_the_next() -> None:
    cache = make(num_pages=16)
    prompt = tokens(1, 2, 3, 4, 5, 6, 7, 8)
    lease = lease_of(cache, prompt)
    cache.announce(lease, prompt, 4, StepId(1))
    cache.announce(lease, prompt, 8, StepId(2))
    cache.commit_step(StepId(1))
    cache.fail_step(StepId(2))
    audit(cache)
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9)) == 4
    longer = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    cache.extend(lease, 10)
    cache.commit(lease, longer, 10, StepId(3))  # with the next page, what was taken out comes back
    audit(cache)
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)) == 10
    cache.release(lease)
    audit(cache)


def test_p05_a_copy_computed_twice_keeps_the_path_above_it_held() -> None:
    """P05: the second computer of a page holds the indexed copy too, so nothing is stranded."""
    cache = make(num_pages=6)
    prompt = tokens(1, 2, 3, 4)
    first, second = lease_of(cache, prompt), lease_of(cache, prompt)
    cache.commit(first, prompt, 4, StepId(1))
    longer = tokens(1, 2, 3, 4, 5, 6)
    assert cache.extend(second, 6) != Refusal.NO_ROOM
    cache.commit(second, longer, 6, StepId(2))
    cache.release(first)
    audit(cache)
    assert cache.num_available_pages == cache.stats().num_free + cache.stats().num_cached
    assert isinstance(reserve(cache, tokens(9, 9)), Lease)
    audit(cache)
    cache.release(second)
    audit(cache)
    assert cache.lookup(BASE, tokens(1, 2, 3, 4, 5, 6, 7)) == 6


def test_p08_publishing_within_a_step_is_the_familys_own_decision() -> None:
    """P08: a family that does not share within a step is findable only once the step commits."""
    family = Family(name="late", shares_within_step=False)
    cache = PrefixCache(family, 8, 2, reuse=True)
    prompt = tokens(1, 2, 3, 4, 5)
    lease = lease_of(cache, prompt)
    cache.announce(lease, prompt, 5, StepId(1))
    assert cache.lookup(BASE, prompt) == 0
    cache.commit_step(StepId(1))
    cache.commit(lease, prompt, 5, StepId(1))
    assert cache.lookup(BASE, prompt) == 4
    audit(cache)
