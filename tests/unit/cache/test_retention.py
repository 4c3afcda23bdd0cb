"""Prefixes that requests mark are kept as asked, within their tenant's share (T13)."""

from __future__ import annotations

import pytest

from manyroots.cache.audit import audit
from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending
from manyroots.cache.policies import Eviction
from manyroots.ids import Namespace
from manyroots.messages import KeepRange, Retention
from manyroots.step import Int32s
from tests.unit.cache.test_eviction import BASE, PAGE, Served

FAMILIES: dict[str, tuple[Family, ...]] = {
    "full": (FULL_ATTENTION,),
    "window": (FULL_ATTENTION, SlidingWindow("window", 6, PAGE)),
    "state": (FULL_ATTENTION, RecurrentState("state", interval=1000)),
}


def keep(
    pages: int, *, priority: int = 50, for_s: float = 60, tenant: str | None = None,
    share: float = 0.5,
) -> Retention:  # fmt: skip
    return Retention((KeepRange(pages * PAGE, priority, for_s),), tenant, share)


def flood(served: Served, num_prompts: int = 60, key: PrefixKey = BASE) -> None:
    for _ in range(num_prompts):
        served.ask(served.fresh(6), key)
    audit(served.cache)


def resumed(served: Served, prefix: Int32s) -> int:
    """Pages that a request finds that goes on from a prefix."""
    return served.cache.lookup(BASE, served.after(prefix, 1)).num_pages


@pytest.mark.parametrize("eviction", list(Eviction))
@pytest.mark.parametrize("kind", FAMILIES)
def test_t13_a_marked_prefix_survives_a_flood_until_its_time_is_over(
    kind: str, eviction: Eviction
) -> None:
    served = Served(100, eviction, FAMILIES[kind])
    served.cache.pass_time(1000.0)
    marked, plain = served.fresh(10)[:-1], served.fresh(10)[:-1]
    served.ask(served.after(marked, 3), retention=keep(10))
    served.ask(served.after(plain, 3))
    flood(served)
    assert (resumed(served, marked), resumed(served, plain)) == (10, 0)
    served.cache.pass_time(1059.9)
    flood(served)
    assert resumed(served, marked) == 10
    served.cache.pass_time(1060.0)
    flood(served)
    assert resumed(served, marked) == 0, "a mark ends on time"


def test_t13_what_follows_the_mark_goes_as_ever() -> None:
    served = Served(100)
    prompt = served.fresh(20)
    served.ask(prompt, retention=keep(7))
    flood(served)
    assert served.found(prompt[: 20 * PAGE]) == 7


def test_t13_a_state_is_saved_at_the_mark_and_not_at_the_interval() -> None:
    """A hybrid's next turn resumes at the mark, however far the interval is."""
    served = Served(100, families=FAMILIES["state"])
    prompt = served.fresh(20)
    served.ask(prompt, retention=keep(7))
    assert resumed(served, prompt[: 7 * PAGE]) == 7
    again = served.fresh(20)
    served.ask(again)
    assert resumed(served, again[: 7 * PAGE]) == 0, "without a mark there is no state there"


def test_t13_a_tenant_that_marks_everything_displaces_its_own_marks_alone() -> None:
    served = Served(100, Eviction.LRU)
    greedy = PrefixKey(Namespace(adapter=None, salt="greedy"))
    modest = served.fresh(5)[:-1]
    served.ask(served.after(modest, 1), retention=keep(5, tenant="modest", share=0.2))
    for _ in range(50):
        served.ask(served.fresh(6), greedy, keep(6, priority=100, tenant="greedy", share=0.3))
        assert served.cache.marks.num_pages <= 30 + 5
    audit(served.cache)
    assert resumed(served, modest) == 5
    # What has no mark still finds room: a prompt is kept while seven others come.
    plain = served.fresh(5)[:-1]
    served.ask(served.after(plain, 1))
    flood(served, 7)
    assert resumed(served, plain) == 5


def test_t13_of_a_tenants_marks_the_weakest_end_first() -> None:
    served = Served(100, Eviction.LRU)
    prompts = {priority: served.fresh(10)[:-1] for priority in (50, 90, 10)}
    for priority, prompt in prompts.items():
        served.ask(served.after(prompt, 1), retention=keep(10, priority=priority, share=0.2))
    flood(served)
    assert {p: resumed(served, prompt) for p, prompt in prompts.items()} == {50: 10, 90: 10, 10: 0}


def test_t13_a_mark_keeps_no_request_waiting() -> None:
    """Where marks are all that is left, the weakest end."""
    served = Served(40, Eviction.LRU)
    weak, strong = served.fresh(15)[:-1], served.fresh(15)[:-1]
    served.ask(served.after(strong, 1), retention=keep(15, priority=90, share=1.0))
    served.ask(served.after(weak, 1), retention=keep(15, priority=10, share=1.0))
    served.ask(served.fresh(20))
    audit(served.cache)
    assert resumed(served, strong) == 15
    assert resumed(served, weak) < 15


def test_t13_ranges_differ_and_what_leads_to_a_page_is_kept_like_it() -> None:
    served = Served(100, Eviction.LRU)
    ranges = (KeepRange(4 * PAGE, 10, 5), KeepRange(8 * PAGE, 20, 50), KeepRange(12 * PAGE, 5, 9))
    prompt = served.fresh(20)
    served.ask(prompt, retention=Retention(ranges, None, 1.0))
    for now_s, num_kept in ((4, 12), (9, 8), (50, 0)):
        served.cache.pass_time(now_s)
        flood(served)
        assert served.found(prompt[: 20 * PAGE]) == num_kept


def test_t13_marking_again_prolongs_a_mark() -> None:
    served = Served(100, Eviction.LRU)
    prompt = served.fresh(10)
    for now_s in (0, 40, 80):
        served.cache.pass_time(now_s)
        assert served.ask(prompt, retention=keep(10)) == (10 if now_s else 0)
        flood(served, 40)
    assert served.cache.marks.num_pages == 10, "one prefix counts once"
    served.cache.pass_time(139)
    flood(served)
    assert served.found(prompt[: 10 * PAGE]) == 10


def test_t13_copies_on_the_host_are_kept_as_well() -> None:
    served = Served(60, Eviction.LRU, num_host_pages=30)
    marked, plain = served.fresh(10)[:-1], served.fresh(10)[:-1]
    served.ask(served.after(marked, 1), retention=keep(10))
    served.ask(served.after(plain, 1))
    flood(served)
    host = served.cache.layout.host[0].index
    kept = [node for node in served.cache.index.tree.nodes() if node.is_marked]
    assert sum(node.counts[host] for node in kept) == 10


@pytest.mark.parametrize("kind", FAMILIES)
def test_t13_a_small_host_tier_ends_no_mark(kind: str) -> None:
    """It has no room for a copy of what is marked, and the device keeps that."""
    served = Served(100, Eviction.LRU, FAMILIES[kind], num_host_pages=12)
    weak, strong = served.fresh(10)[:-1], served.fresh(10)[:-1]
    served.ask(served.after(weak, 1), retention=keep(10, priority=10))
    served.ask(served.after(strong, 1), retention=keep(10, priority=90))
    flood(served, 40)
    assert (resumed(served, weak), resumed(served, strong)) == (10, 10)
    assert served.cache.marks.num_pages == 20
    served.cache.pass_time(60)
    flood(served, 40)
    assert (resumed(served, weak), resumed(served, strong)) == (0, 0)


def test_t13_a_request_that_never_starts_marks_nothing() -> None:
    """It claims and gives back at every step while it waits: storage would hear of it each time."""
    served = Served(40)
    prompt = served.fresh(10)
    served.ask(prompt)
    for ending, num_marked in ((Ending.DROPPED, 0), (Ending.FINISHED, 9)):
        lease = served.cache.claim(BASE, prompt, len(prompt), True, keep(9))
        served.cache.release(lease, ending)
        assert served.cache.marks.num_pages == num_marked
