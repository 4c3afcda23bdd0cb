"""Namespaces in the cache: whose page is whose, on every tier, and how a namespace goes away."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.events import PagesRemoved, PagesStored
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.keys import Owner, PageHasher, PrefixKey
from manyroots.cache.outcomes import Ending
from manyroots.cache.planes import Capacity
from manyroots.cache.policies import CachePolicies, WriteBack
from manyroots.ids import AdapterDigest, Namespace, RequestId, Tier
from manyroots.messages import Submit
from manyroots.sampling import SamplingParams
from tests.helpers.cache_harness import (
    ADAPTER_A,
    ADAPTER_B,
    BASE,
    CacheHarness,
    ints,
    path_of,
    recurrent,
    resident,
    window,
)

A, B, PLAIN = PrefixKey(ADAPTER_A), PrefixKey(ADAPTER_B), PrefixKey(BASE)
PROMPT = [1, 2, 3, 4, 5, 6, 7]

MIXES = {
    "full": ("full",),
    "window": ("window",),
    "state": ("state",),
    "full+window": ("full", "window"),
    "full+state": ("full", "state"),
    "window+state": ("window", "state"),
    "all": ("full", "window", "wide", "state"),
}


def capacities(mix: str, *, device: int = 16, host: int = 0) -> list[Capacity]:
    families = {
        "full": FULL_ATTENTION,
        "window": window(3, 2),
        "wide": window(5, 2, "wide"),
        "state": recurrent(1),
    }
    return [Capacity(families[name], device, host) for name in MIXES[mix]]


def activated_capacities(mix: str) -> list[Capacity]:
    """As `capacities`, with room for nine prompts and windows for pages of 4."""
    families = {
        "full": FULL_ATTENTION,
        "window": window(6, 4),
        "wide": window(9, 4, "wide"),
        "state": recurrent(1),
    }
    return [Capacity(families[name], 64) for name in MIXES[mix]]


def free(hand: CacheHarness) -> list[int]:
    return [plane.num_free for plane in hand.cache.stats().planes]


@pytest.mark.parametrize("host", [0, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_n05_a_cold_adapter_matches_nothing_and_computes_exactly_its_prompt(
    mix: str, host: int
) -> None:
    """N05: however warm the others are, in every mix of families."""
    hand = CacheHarness(*capacities(mix, host=host))
    for key in (PLAIN, B):
        hand.serve(key, PROMPT)
    hand.settle()
    match = hand.cache.lookup(A, ints(*PROMPT))
    assert (match.num_pages, match.num_device_pages) == (0, 0)
    sequence = hand.claim(A, PROMPT)
    assert sequence.num_computed == 0
    computed = []
    while sequence.num_computed < len(PROMPT):
        part = hand.plan(sequence).parts[0]
        hand.commit()
        computed.append((part.begin, part.end))
    assert computed[0][0] == 0
    assert sum(end - begin for begin, end in computed) == len(PROMPT)


def test_n02_the_base_model_behaves_the_same_whether_or_not_adapters_are_used() -> None:
    """N02: its hashes, events, hits and units in the tree's order are the same bytes."""

    def base_side(*, with_adapters: bool) -> tuple[object, ...]:
        hand = CacheHarness(
            Capacity(FULL_ATTENTION, 64, 64),
            policies=CachePolicies(records_events=True, uses_storage=True, identity=b"m"),
        )
        hits = []
        for number in range(4):
            if with_adapters:
                hand.serve(A, PROMPT)
                hand.serve(PrefixKey(Namespace(adapter=None, salt="tenant")), PROMPT)
            hits.append(hand.serve(PLAIN, [*PROMPT[: 3 + number], 9, 9]))
            hand.settle()
        events = [event for event in hand.cache.take_events() if event.namespace == BASE]
        pages = {path for _, path in resident(hand.cache) if path[0][0].namespace == BASE}
        return hits, events, pages

    assert base_side(with_adapters=False) == base_side(with_adapters=True)


@pytest.mark.parametrize("mix", MIXES)
def test_n06_the_namespace_follows_a_request_through_chunks_and_decode_pages(mix: str) -> None:
    """N06: three chunks and decode pages; base and the other adapter find none, A finds all."""
    hand = CacheHarness(*capacities(mix))
    sequence = hand.claim(A, PROMPT)
    while sequence.num_computed < len(PROMPT) + 5:
        hand.plan(sequence, most=3)
        hand.commit()
    tokens = sequence.tokens
    hand.end(sequence)
    assert len(tokens) == len(PROMPT) + 6
    assert hand.found(A, tokens) == 12
    assert hand.found(PLAIN, tokens) == hand.found(B, tokens) == 0


def test_n08_pages_prefetched_from_storage_land_in_the_requests_namespace() -> None:
    """N08: a new server asks the storage tier for A's pages; A hits, base and B miss."""
    policies = CachePolicies(uses_storage=True)
    old = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    old.serve(A, PROMPT)
    old.settle()
    new = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies, storage=old.storage)
    for key in (PLAIN, B):
        new.cache.prefetch(key, ints(*PROMPT))
        new.settle()
        assert new.found(key, PROMPT) == 0
    assert new.cache.prefetch(A, ints(*PROMPT)) is not None
    new.settle()
    assert new.found(PLAIN, PROMPT) == new.found(B, PROMPT) == 0
    assert new.found(A, PROMPT) == 6
    assert new.serve(A, PROMPT) == 6


@pytest.mark.parametrize("mix", MIXES)
def test_n09_write_back_and_reload_work_for_an_adapter_that_matched_nothing(mix: str) -> None:
    """N09, H03: written to the host, evicted from the device, loaded again, never recomputed."""
    hand = CacheHarness(*capacities(mix, device=4, host=16))
    assert hand.serve(A, PROMPT) == 0
    hand.settle()
    before = hand.found(A, PROMPT)
    assert before > 0
    for start in (20, 30, 40):
        hand.serve(PLAIN, [start + i for i in range(8)])
        hand.settle()
    match = hand.cache.lookup(A, ints(*PROMPT))
    assert (match.num_device_pages, match.num_pages * 2) == (0, before)
    sequence = hand.claim(A, PROMPT)
    assert hand.cache.onboard(sequence.held) is None
    hand.settle()
    while sequence.num_computed < len(PROMPT):  # reads what was loaded, and checks it
        hand.plan(sequence)
        hand.commit()
    assert sequence.held.num_host_tokens == before
    hand.end(sequence)
    audit(hand.cache)


def test_n10_no_namespace_key_or_field_of_it_has_a_default() -> None:
    """N10: leaving one out is a TypeError everywhere, never the base model."""
    assert not Namespace._field_defaults
    with pytest.raises(TypeError):
        Namespace(adapter=AdapterDigest(b"a"))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        PrefixKey()  # type: ignore[call-arg]
    for field in dataclasses.fields(Submit):
        if field.name in ("salt", "adapter"):  # whose pages, and whose weights
            assert field.default is field.default_factory is dataclasses.MISSING, field
    with pytest.raises(TypeError, match="adapter"):
        Submit(RequestId(1), [1], None, SamplingParams(), 0, ())  # type: ignore[call-arg]
    methods: list[tuple[Callable[..., object], str]] = [
        (PrefixCache.lookup, "key"),
        (PrefixCache.claim, "key"),
        (PrefixCache.prefetch, "key"),
        (PrefixCache.evict_namespace, "namespace"),
        (PageHasher.chain, "owner"),
    ]
    for method, name in methods:
        parameter = inspect.signature(method).parameters[name]
        assert parameter.default is inspect.Parameter.empty, method


def stored(hand: CacheHarness) -> list[PagesStored]:
    return [event for event in hand.cache.take_events() if isinstance(event, PagesStored)]


def test_n11_every_pages_hash_carries_the_namespace_and_parents_chain() -> None:
    """N11: also where the prompt is shorter than a page and the chain starts while decoding."""
    hashes = {}
    for key in (PLAIN, A, B, PrefixKey(Namespace(adapter=ADAPTER_A.adapter, salt="t"))):
        hand = CacheHarness(policies=CachePolicies(records_events=True))
        sequence = hand.claim(key, [1])
        # The same tokens for all, whatever each would have sampled.
        for token in (2, 3, 4, 5, 6, 7):
            hand.plan(sequence)
            hand.commit()
            sequence.tokens[-1] = token
        hand.end(sequence)
        events = stored(hand)
        chain = [digest for event in events for digest in event.hashes]
        assert [(event.namespace, event.begin) for event in events] == [key.at(0)] * 3
        assert [event.parent for event in events] == [None, *chain[:-1]]
        hashes[key] = chain
    pages = [digest for chain in hashes.values() for digest in chain]
    assert len(pages) == len(set(pages)) == 12


def test_n11_p06_storage_keys_are_the_hashes_of_the_events() -> None:
    """N11, P06: hashes are set when a page is published, so the keys of an extended prompt are
    those of the same prompt computed at once."""
    policies = CachePolicies(records_events=True, uses_storage=True)
    whole = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    whole.serve(A, [1, 2, 3, 4, 5, 6, 7])
    whole.settle()
    grown = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    for length in (3, 5, 7):
        grown.serve(A, [1, 2, 3, 4, 5, 6, 7][:length])
    other = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    other.serve(B, [1, 2, 3, 4, 5, 6, 7])
    grown.settle()
    other.settle()
    assert set(whole.storage) == set(grown.storage)
    assert len(whole.storage) == 3
    assert not set(whole.storage) & set(other.storage)
    on_device = {d for e in stored(whole) if e.tier is Tier.DEVICE for d in e.hashes}
    assert {digest for _, digest in whole.storage} == on_device


def test_p06_a_page_is_hashed_the_same_on_every_tier_and_after_a_split() -> None:
    """P06: where prompts part, the run is split; what was hashed before stays as it is."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16, 16), policies=CachePolicies(records_events=True)
    )  # fmt: skip
    hand.serve(A, PROMPT)
    hand.serve(A, [1, 2, 3, 4, 9, 9, 9])
    hand.settle()
    tiers: dict[Tier, list[bytes]] = {Tier.DEVICE: [], Tier.HOST: []}
    parents: dict[bytes, set[bytes | None]] = {}
    for event in stored(hand):
        tiers[event.tier] += event.hashes
        for parent, digest in zip((event.parent, *event.hashes), event.hashes, strict=False):
            parents.setdefault(digest, set()).add(parent)
    assert sorted(tiers[Tier.DEVICE]) == sorted(tiers[Tier.HOST])
    assert len(set(tiers[Tier.DEVICE])) == 4
    assert all(len(found) == 1 for found in parents.values())


@pytest.mark.parametrize("host", [0, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_n12_n16_evicting_a_namespace_frees_all_it_has_at_once(mix: str, host: int) -> None:
    """N12, N16: pages, window pages and states, on device and host; the others keep theirs."""
    hand = CacheHarness(*capacities(mix, host=host))
    hand.serve(PLAIN, PROMPT)
    hand.settle()
    before, kept = free(hand), hand.found(PLAIN, PROMPT)
    hand.serve(A, PROMPT)
    hand.settle()
    assert all(now < then for now, then in zip(free(hand), before, strict=True))
    used = [then - now for now, then in zip(free(hand), before, strict=True)]
    assert hand.cache.evict_namespace(ADAPTER_A).num_freed == tuple(used)
    audit(hand.cache)
    assert free(hand) == before
    assert hand.found(A, PROMPT) == 0
    assert hand.found(PLAIN, PROMPT) == kept > 0


def test_n12_an_answer_from_storage_that_was_asked_for_before_lands_nowhere() -> None:
    """N12: a prefetch under way does not bring an evicted namespace back."""
    policies = CachePolicies(uses_storage=True)
    old = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    old.serve(A, PROMPT)
    old.settle()
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies, storage=old.storage)
    before = free(hand)
    assert hand.cache.prefetch(A, ints(*PROMPT)) is not None
    hand.take_copies()
    hand.cache.evict_namespace(ADAPTER_A)
    hand.settle()
    assert hand.found(A, PROMPT) == 0
    assert free(hand) == before


@pytest.mark.parametrize("evict", ["adapter", "all"])
def test_n12_n13_an_unload_bars_an_answer_of_a_namespace_that_has_nothing_else(evict: str) -> None:
    """N12, N13: an adapter that has neither pages nor requests here, only a question to storage
    under way. A request of the same tokens that comes after the unload asks anew and finds its
    own answer."""
    policies = CachePolicies(uses_storage=True)
    old = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    old.serve(A, PROMPT)
    old.serve(B, PROMPT)
    old.settle()
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies, storage=old.storage)
    before = free(hand)
    for key in (A, B):
        assert hand.cache.prefetch(key, ints(*PROMPT)) is not None
    hand.take_copies()
    if evict == "adapter":
        assert ADAPTER_A.adapter is not None
        hand.cache.evict_adapter(ADAPTER_A.adapter)
    else:
        hand.cache.evict_all()
    hand.settle()
    assert (hand.found(A, PROMPT), hand.found(B, PROMPT)) == (0, 6 if evict == "adapter" else 0)
    hand.cache.evict_namespace(ADAPTER_B)
    assert free(hand) == before
    assert hand.cache.prefetch(A, ints(*PROMPT)) is not None
    hand.settle()
    assert hand.found(A, PROMPT) == 6


def test_n12_a_write_back_under_way_does_not_bring_an_evicted_namespace_back() -> None:
    """N12: both ends of the copy are free once it has ended."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16))
    hand.serve(A, PROMPT)
    hand.take_copies()
    hand.cache.evict_namespace(ADAPTER_A)
    audit(hand.cache)
    hand.settle()
    assert free(hand) == [16, 16]


@pytest.mark.parametrize("mix", MIXES)
def test_n13_what_a_running_request_holds_stays_and_goes_when_it_ends(mix: str) -> None:
    """N13: it computes on unharmed, publishes no more, and no second call is needed."""
    hand = CacheHarness(*capacities(mix))
    done = hand.run(A, [1, 2, 3, 4, 9])
    hand.end(done)
    running = hand.run(A, PROMPT)
    before = free(hand)
    held = [plane.num_held for plane in hand.cache.stats().planes]
    hand.cache.evict_namespace(ADAPTER_A)
    audit(hand.cache)
    assert [plane.num_held for plane in hand.cache.stats().planes] == held
    assert all(plane.num_cached == 0 for plane in hand.cache.stats().planes)
    assert free(hand) >= before
    for _ in range(4):  # every step reads what it holds, and checks it
        assert hand.plan(running).parts
        hand.commit()
        audit(hand.cache)
    assert hand.found(A, running.tokens) == 0
    hand.end(running)
    audit(hand.cache)
    assert free(hand) == [16] * len(MIXES[mix])


def test_n13_a_request_that_began_after_the_eviction_publishes_again() -> None:
    """N13, N14: the same content loaded again is a new life of the namespace."""
    hand = CacheHarness()
    old = hand.run(A, PROMPT)
    hand.cache.evict_namespace(ADAPTER_A)
    new = hand.run(A, PROMPT)
    assert new.held.num_cached_tokens == 0
    assert hand.found(A, PROMPT) == 6
    hand.end(old)
    hand.end(new)
    audit(hand.cache)
    assert hand.found(A, PROMPT) == 6


def test_n14_one_removal_for_each_page_and_the_stores_again_after_a_reload() -> None:
    """N14: per tier; removed are exactly the pages that were stored."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16, 16), policies=CachePolicies(records_events=True)
    )
    hand.serve(PLAIN, PROMPT)
    hand.settle()
    hand.cache.take_events()

    def stores() -> list[tuple[Tier, bytes]]:
        hand.serve(A, PROMPT)
        hand.serve(A, [1, 2, 9, 9, 9])
        hand.settle()
        return sorted(
            ((e.tier, digest) for e in stored(hand) for digest in e.hashes), key=str
        )  # fmt: skip

    first = stores()
    hand.cache.evict_namespace(ADAPTER_A)
    removed = hand.cache.take_events()
    assert all(isinstance(event, PagesRemoved) for event in removed)
    assert {event.namespace for event in removed} == {ADAPTER_A}
    assert sorted(((e.tier, d) for e in removed for d in e.hashes), key=str) == first
    assert len(first) == 2 * 4
    assert stores() == first


def test_n15_evicting_again_or_an_unknown_namespace_changes_nothing() -> None:
    """N15: idempotent and harmless, also with requests in flight."""
    hand = CacheHarness(
        Capacity(FULL_ATTENTION, 16, 16), policies=CachePolicies(records_events=True)
    )
    hand.serve(PLAIN, PROMPT)
    running = hand.run(PLAIN, [8, 8, 8])
    hand.serve(A, PROMPT)
    hand.settle()
    hand.cache.evict_namespace(ADAPTER_A)
    hand.cache.take_events()
    before, pages = hand.cache.stats(), resident(hand.cache)
    for namespace in (ADAPTER_A, ADAPTER_B, Namespace(adapter=None, salt="nobody")):
        evicted = hand.cache.evict_namespace(namespace)
        assert set(evicted.num_freed) == {0}
    assert hand.cache.take_events() == []
    assert (hand.cache.stats(), resident(hand.cache)) == (before, pages)
    hand.end(running)
    audit(hand.cache)


def test_n18_a_namespace_has_nothing_of_its_own_that_could_be_evicted() -> None:
    """N18: with every page of an adapter evicted, it works as before: no root page, no sentinel,
    nothing to load first, and as many pages as the base model can have."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 4))
    assert hand.serve(A, PROMPT) == 0
    assert hand.serve(PLAIN, [20, 21, 22, 23, 24, 25, 26]) == 0  # takes every page
    assert hand.found(A, PROMPT) == 0
    assert hand.serve(A, PROMPT) == 0
    assert hand.serve(A, PROMPT) == 6
    hand.cache.evict_namespace(ADAPTER_A)
    assert free(hand) == [4]


def test_n20_other_content_under_the_same_name_never_hits_and_the_same_content_may() -> None:
    """N20: the namespace is the digest. Device pages go with an unload; what storage has is found
    again by the same content, and by no other."""
    policies = CachePolicies(uses_storage=True)
    hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
    hand.serve(A, PROMPT)
    hand.settle()
    hand.cache.evict_namespace(ADAPTER_A)
    reloaded_otherwise = PrefixKey(Namespace(adapter=AdapterDigest(b"a" * 31 + b"!"), salt=None))
    for key, found in [(reloaded_otherwise, 0), (A, 6)]:
        hand.cache.prefetch(key, ints(*PROMPT))
        hand.settle()
        assert hand.found(key, PROMPT) == found


class TestActivated:
    """aLoRA: the base's pages before the invocation, the adapter's from there on."""

    KEY = PrefixKey.activated(BASE, ADAPTER_A, num_base_tokens=5, page_size=2)
    """Pages 0 and 1 lie wholly before the invocation at token 5."""

    @pytest.mark.parametrize("mix", MIXES)
    def test_n22_pages_before_the_invocation_are_shared_with_base(self, mix: str) -> None:
        """N22: in both directions, and nothing after it is shared."""
        hand = CacheHarness(*capacities(mix))
        hand.serve(PLAIN, PROMPT)
        assert hand.found(self.KEY, PROMPT) == 4
        assert hand.serve(self.KEY, PROMPT) == 4
        assert hand.found(self.KEY, PROMPT) == 6
        assert hand.found(PLAIN, PROMPT) == 6
        assert hand.found(A, PROMPT) == 0
        other = CacheHarness(*capacities(mix))
        other.serve(self.KEY, PROMPT)
        assert other.found(PLAIN, PROMPT) == other.found(self.KEY, [*PROMPT[:4], 0]) == 4
        assert other.found(self.KEY, PROMPT) == 6

    def test_n22_what_comes_behind_the_invocation_lies_below_its_own_pages(self) -> None:
        """N22: where base computed the very same tokens before, the adapter's pages part from
        base's at the invocation, not where the tokens do."""
        hand = CacheHarness()
        hand.serve(PLAIN, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        hand.serve(self.KEY, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
        expected = {path_of(PLAIN, [1, 2, 3, 4, 5, 6, 7, 8], n, 2) for n in range(1, 5)}
        tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        expected |= {path_of(self.KEY, tokens, n, 2) for n in range(1, 6)}
        assert {path for _, path in resident(hand.cache)} == expected
        assert hand.found(self.KEY, [*tokens, 0]) == 10

    def test_n22_the_adapter_never_fills_a_page_of_base(self) -> None:
        """N22: base's window pages were evicted; the adapter computes the same tokens. What base
        finds afterwards was computed by base."""
        hand = CacheHarness(Capacity(FULL_ATTENTION, 32), Capacity(window(3, 2), 6))
        tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        hand.serve(PLAIN, tokens)
        hand.serve(B, [31, 32, 33, 34, 35])
        lease = hand.claim(PLAIN, [1, 2, 3, 4, 5])
        hand.serve(B, [41, 42, 43, 44, 45, 46])
        hand.end(lease)
        hand.serve(self.KEY, tokens)
        hand.serve(PLAIN, [*tokens, 10, 11])  # reads, and checks, all it finds
        hand.serve(PLAIN, tokens[:7])

    def test_n22_evicting_the_adapter_leaves_bases_pages(self) -> None:
        """N22, N12: and evicting base takes what was built on it along."""
        hand = CacheHarness()
        hand.serve(self.KEY, PROMPT)
        hand.cache.evict_namespace(ADAPTER_A)
        assert hand.found(PLAIN, PROMPT) == 4
        hand.serve(self.KEY, PROMPT)
        hand.cache.evict_namespace(BASE)
        assert free(hand) == [16]

    def test_n22_an_invocation_in_the_first_page_leaves_nothing_to_base(self) -> None:
        """N22: a page with one token of the adapter's is the adapter's."""
        key = PrefixKey.activated(BASE, ADAPTER_A, num_base_tokens=1, page_size=2)
        assert [key.at(page) for page in range(2)] == [(ADAPTER_A, 1), (ADAPTER_A, 0)]
        assert PrefixKey.activated(BASE, ADAPTER_A, num_base_tokens=0, page_size=2) == A
        owners = [self.KEY.at(page) for page in range(4)]
        assert owners == [(BASE, 0), (BASE, 0), (ADAPTER_A, 1), (ADAPTER_A, 0)]

    @pytest.mark.parametrize("mix", MIXES)
    def test_n23_where_an_adapter_begins_in_a_page_is_part_of_its_key(self, mix: str) -> None:
        """N23: the same tokens, with the adapter from every token on. Each finds what was computed
        alike and no more: pages wholly before both beginnings. What is found is read, too."""
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        keys = [PrefixKey.activated(BASE, ADAPTER_A, begin, page_size=4) for begin in range(9)]
        for one in range(9):
            hand = CacheHarness(*activated_capacities(mix), page_size=4)
            hand.serve(keys[one], prompt)
            for other in range(9):
                alike = min(one, other) // 4 * 4 if one != other else 8
                assert hand.found(keys[other], prompt) == alike
            for other in range(9):
                hand.serve(keys[other], prompt)
            assert [hand.found(key, prompt) for key in keys] == [8] * 9

    def test_n23_pages_behind_are_found_below_their_own_beginning_only(self) -> None:
        """N23: they have the adapter's key and the same tokens, and differ by what leads there."""
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        hand = CacheHarness(Capacity(FULL_ATTENTION, 64))
        begins = [PrefixKey.activated(BASE, ADAPTER_A, begin, 2) for begin in (3, 2, 1, 0)]
        for number, key in enumerate(begins):
            hand.serve(key, prompt)
            longer = {path for _, path in resident(hand.cache) if len(path) == 5}
            assert len(longer) == number + 1
            assert {path[4] for path in longer} == {(key.at(4), ints(9, 10).tobytes())}
        starts = hand.cache.index.tree.by_namespace[ADAPTER_A]
        assert len(starts) == 4, "what lies below a beginning goes with it"
        hand.cache.evict_namespace(ADAPTER_A)
        audit(hand.cache)
        assert {path for _, path in resident(hand.cache)} == {path_of(PLAIN, prompt, 1, 2)}

    def test_n23_hashes_events_and_storage_keys_carry_the_beginning(self) -> None:
        """N23, N11, K02: a page in which the adapter begins is another page outside, too, and so
        are all pages after it; an event says where it begins."""
        policies = CachePolicies(
            records_events=True, uses_storage=True, write_back=WriteBack.THROUGH
        )
        pages: dict[int, list[bytes]] = {}
        for begin in range(4):
            hand = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies, page_size=4)
            key = PrefixKey.activated(BASE, ADAPTER_A, begin, page_size=4)
            hand.serve(key, [1, 2, 3, 4, 5, 6, 7, 8, 9])
            hand.settle()
            told = [event for event in stored(hand) if event.tier is Tier.DEVICE]
            hand.cache.evict_namespace(ADAPTER_A)
            gone = [e for e in hand.cache.take_events() if e.tier is Tier.DEVICE]
            assert sorted((e.namespace, e.begin, e.hashes) for e in told) == sorted(
                (e.namespace, e.begin, e.hashes) for e in gone
            )
            assert told[0].begin == begin
            assert {event.begin for event in told[1:]} <= {0}
            pages[begin] = [digest for event in told for digest in event.hashes]
            assert {digest for _, digest in hand.storage} == set(pages[begin])
        assert len({digest for hashes in pages.values() for digest in hashes}) == 8

    def test_n22_hashes_chain_across_the_invocation(self) -> None:
        """N22, N11: storage gives back both parts, to the same key only."""
        policies = CachePolicies(uses_storage=True, write_back=WriteBack.THROUGH)
        old = CacheHarness(Capacity(FULL_ATTENTION, 16, 16), policies=policies)
        old.serve(self.KEY, PROMPT)
        old.settle()
        found: list[int] = []
        for key in (self.KEY, PLAIN, A):
            new = CacheHarness(
                Capacity(FULL_ATTENTION, 16, 16), policies=policies, storage=old.storage
            )
            new.cache.prefetch(key, ints(*PROMPT))
            new.settle()
            found.append(new.found(key, PROMPT))
        assert found == [6, 4, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n._replace(salt=""),
        lambda n: n._replace(salt="basesalt"),
        lambda n: n._replace(adapter=AdapterDigest(b"")),
        lambda n: n._replace(adapter=AdapterDigest(b"base")),
    ],
)
def test_n11_no_field_of_a_namespace_can_be_mistaken_for_another(
    change: Callable[[Namespace], Namespace],
) -> None:
    """N11, N04: empty fields and fields that spell others hash to other pages."""
    hasher = PageHasher(b"model", 8)
    keys = np.zeros(2, np.int32).tobytes()
    one, other = Owner(BASE, 0), Owner(change(BASE), 0)
    assert hasher.chain(hasher.root, one, keys) != hasher.chain(hasher.root, other, keys)
    assert PageHasher(b"model2", 8).root != hasher.root


def test_n07_a_dropped_lease_leaves_its_pages_in_its_own_namespace() -> None:
    """N07: only a retracted request finds again what it published."""
    hand = CacheHarness()
    hand.end(hand.run(A, PROMPT, max_output=3), Ending.DROPPED)
    assert hand.found(A, PROMPT) == 6
    assert hand.found(PLAIN, PROMPT) == hand.found(B, PROMPT) == 0


@pytest.mark.parametrize("mix", MIXES)
def test_n03_an_adapter_finds_and_takes_what_base_does(mix: str) -> None:
    """N03: the same prompts with an adapter and without one, side by side: as many tokens found
    before and after each, and as many pages free, cached and held while it runs and afterwards."""
    prompts = [PROMPT, PROMPT, [*PROMPT, 8, 9, 10], PROMPT[:5], [1, 2, 3, 9, 9, 9], PROMPT[:3]]

    def side(key: PrefixKey) -> list[object]:
        hand = CacheHarness(*capacities(mix))
        seen: list[object] = []
        for prompt in prompts:
            seen.append(hand.found(key, prompt))
            running = hand.run(key, prompt)
            seen.append((running.held.num_cached_tokens, hand.cache.stats().planes))
            hand.end(running)
            seen.append((hand.found(key, prompt), hand.cache.stats().planes))
        return seen

    base = side(PLAIN)
    assert side(A) == base
    assert side(PrefixKey(Namespace(adapter=ADAPTER_A.adapter, salt="tenant"))) == base
    assert base[2] == (6, base[2][1])  # type: ignore[index]  # all but the page of the last token


def test_n13_leases_that_go_on_do_not_slow_down_those_that_came_after_an_eviction() -> None:
    """N13: what an eviction forbids ends with the leases that were open then. On a busy server
    some lease is always open; new ones publish in the quick way all the same."""
    hand = CacheHarness(Capacity(FULL_ATTENTION, 64))
    before, bases = hand.claim(A, PROMPT), hand.claim(PLAIN, [9, 9, 9])
    hand.cache.evict_namespace(ADAPTER_A)
    others = [before, bases]
    inserted: list[object] = []
    insert = hand.cache.index.tree.insert

    def counted(*arguments: Any, **named: Any) -> Any:
        inserted.append(arguments)
        return insert(*arguments, **named)

    hand.cache.index.tree.insert = counted  # type: ignore[method-assign]
    hand.plan(bases)
    hand.commit()
    assert hand.found(PLAIN, [9, 9, 9]) == 2, "base's requests have nothing to do with it"
    for number in range(3):
        others.append(hand.run(A, [20 + number, *PROMPT], max_output=3))
        hand.end(others.pop(0))  # so that there is always one
        assert hand.cache.open_leases
        assert hand.found(A, [20 + number, *PROMPT]) == 6
    assert not inserted, "new pages are published the slow way"
