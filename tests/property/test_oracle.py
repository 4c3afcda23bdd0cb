"""The cache agrees with a dictionary, over seeds of our own (R02)."""

from __future__ import annotations

from collections import Counter

import pytest

from manyroots.cache.policies import WriteBack
from tests.helpers.seeded import Draw, seeds
from tests.property.cache_oracle import Call, Machine, Setting, Walk

NUM_RULES = 6_000


def test_r02_the_cache_agrees_with_a_dictionary_over_families_tiers_namespaces_and_salts() -> None:
    """R02, K02: any calls in any order over random families, tiers, policies, adapters, salts and
    switching keys. Lookups are the longest boundary that a dictionary gives; no unit that can be
    found holds anything else; nothing is lost, kept, published or evicted without a reason; a
    consumer of the events sees the same; and every invariant holds after every rule."""
    ran: Counter[str] = Counter()
    for seed in seeds(NUM_RULES // 150):
        walk = Walk.of(seed)
        try:
            ran += walk.run().ran
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{walk.shortest()}") from error
    assert sum(ran.values()) >= NUM_RULES or Draw.only_seed is not None, ran


def test_r02_a_write_back_may_make_room_on_the_host_though_the_device_has_some() -> None:
    """R02: a walk that the oracle once called wrong. With write-back of what is reused, a request
    that begins has what it found copied to the host, which may be full where the device is not."""
    Walk(Setting(("window",), 1, 3, 4, WriteBack.REUSED, 8, 2), (
        Call("plan", 15, 14, 1), Call("commit", 5, 126, 4), Call("claim", 9, 104, 6),
        Call("commit", 9, 85, 7), Call("claim", 10, 45, 6), Call("release", 11, 226, 4),
        Call("guess", 9, 75, 4), Call("plan", 1, 146, 2), Call("claim", 15, 92, 3),
        Call("evict_namespace", 3, 218, 2), Call("acknowledge", 0, 242, 9), Call("fail", 8, 9, 9),
        Call("guess", 6, 81, 8), Call("commit", 8, 166, 1), Call("claim", 0, 240, 6),
        Call("commit", 4, 145, 9),
    )).run()  # fmt: skip


def test_r02_a_page_may_be_evicted_and_computed_again_in_the_same_unit_by_one_step() -> None:
    """R02: a walk that the oracle once called wrong. The host keeps a window's page for a request
    that waits; the page of full attention that leads to it is on the device alone. A step evicts
    that page, which takes the kept one along, and computes it again where it was."""
    Walk(Setting(("full", "window"), 1, 0, 4, WriteBack.REUSED, 2, 0), (
        Call("claim", 3, 135, 2), Call("prefetch", 0, 203, 5), Call("acknowledge", 4, 39, 2),
        Call("commit", 2, 125, 7), Call("release", 6, 103, 1), Call("release", 7, 75, 6),
        Call("claim", 4, 38, 8), Call("commit", 6, 175, 3), Call("acknowledge", 9, 3, 5),
        Call("commit", 3, 236, 10), Call("guess", 6, 39, 4), Call("claim", 6, 66, 3),
        Call("acknowledge", 11, 108, 8), Call("prefetch", 2, 36, 7), Call("release", 0, 21, 8),
        Call("acknowledge", 0, 204, 4), Call("fail", 7, 162, 2), Call("commit", 11, 50, 7),
        Call("acknowledge", 13, 45, 2), Call("onboard", 10, 252, 1),
        Call("evict_namespace", 15, 95, 1), Call("keep", 15, 235, 2), Call("prefetch", 8, 45, 6),
        Call("claim", 2, 249, 1), Call("onboard", 3, 46, 1), Call("prefetch", 13, 119, 9),
    )).run()  # fmt: skip


@pytest.mark.parametrize("seed", [30001723, 30002474])
def test_r02_storage_is_asked_for_states_after_the_pages(seed: int) -> None:
    """R02: walks that the oracle once called wrong. Where the host has fewer units for states
    than a prompt has pages, a prefetch needs room for one state, and answers lead to questions."""
    Walk.of(seed).run()


@pytest.mark.parametrize("seed", [60_000_182, 60_000_553, 60_000_991])
def test_r02_l04_a_load_of_a_state_takes_the_room_of_one_that_an_output_has_passed(
    seed: int,
) -> None:
    """R02, L04: where no unit is free, the older state of a request's output is."""
    Walk.of(seed).run()


@pytest.mark.parametrize("seed", [5_040_540, 5_043_029])
def test_r02_a_state_may_be_evicted_and_saved_again_in_the_same_unit_by_one_step(seed: int) -> None:
    """If the request is dropped or the step fails, the state is gone. 39 walks of 47,850 did that,
    before the oracle knew it."""
    Walk.of(seed).run()


def test_r02_a_page_that_arrives_after_its_place_was_taken_is_dropped() -> None:
    """R02, T08: a window's page was copied to the host while the device lost it, and an output grew
    in its place: the host then had the page under the tokens of the other."""
    Walk.of(4874).run()


def test_r02_n22_pages_after_an_evicted_one_of_an_adapter_do_not_follow_the_base_models() -> None:
    """R02, N22: an adapter was activated within a page, and a window evicted that page. The base
    model's page with the same tokens grew in its place, and the adapter's next page was found
    below it."""
    Walk.of(100010874).run()


def test_r02_t09_a_page_that_arrives_before_the_one_above_it_is_not_lost_on_the_host() -> None:
    """R02, T09: a request loaded two pages, and the later one arrived first. Its host copy was
    evicted, and with it the tree lost the window's unit that the request held."""
    Walk.of(220011534).run()


def test_a_walk_means_the_same_every_time_and_is_told_as_code_that_replays_it() -> None:
    walk = Walk.of(7)
    assert walk == Walk.of(7)
    assert walk.calls[:20] == Walk.of(7, 20).calls
    again = eval(str(walk).removesuffix(".run()"))
    assert again == walk
    assert again.run().ran == walk.run().ran


def test_a_walk_that_fails_is_made_as_short_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Machine, namespace: object) -> None:
        assert not self.sequences, "planted"

    monkeypatch.setattr(Machine, "evict_namespace", broken)
    walk = next(walk for walk in map(Walk.of, range(20)) if walk.failure())
    short = walk.shortest()
    assert str(short.failure()).startswith("planted")
    # Two: someone is claimed, and a namespace evicted.
    assert len(short.calls) == 2
