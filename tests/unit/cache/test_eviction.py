"""What goes when room is needed: shared prefixes outlive prompts that come once, within a share of
the pool that is learned; everything else goes by its last use."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from manyroots.cache.audit import audit
from manyroots.cache.cache import PrefixCache
from manyroots.cache.families.family import Family
from manyroots.cache.families.full import FULL_ATTENTION
from manyroots.cache.families.recurrent import RecurrentState
from manyroots.cache.families.window import SlidingWindow
from manyroots.cache.fork_share import LEAST, MAX_NAMES, MOST, START, ForkShare, name_of
from manyroots.cache.keys import PrefixKey
from manyroots.cache.outcomes import Ending, Refusal
from manyroots.cache.planes import CacheLayout, Capacity
from manyroots.cache.policies import CachePolicies, Eviction
from manyroots.ids import Namespace, StepId
from manyroots.messages import Retention
from manyroots.step import CopyDone, Int32s

BASE = PrefixKey(Namespace(adapter=None, salt=None))
PAGE = 4


class Served:
    """A cache that serves one prompt after the other, audited."""

    def __init__(
        self,
        num_pages: int,
        eviction: Eviction = Eviction.FORKS,
        families: tuple[Family, ...] = (FULL_ATTENTION,),
        num_host_pages: int = 0,
    ) -> None:
        capacities = tuple(Capacity(family, num_pages, num_host_pages) for family in families)
        self.cache = PrefixCache(CacheLayout.of(PAGE, capacities), CachePolicies(eviction=eviction))
        self.step = 0
        self.next_token = 1_000

    def ask(self, tokens: Int32s, key: PrefixKey = BASE, retention: Retention | None = None) -> int:
        """Serve a prompt; gives how many pages of it were found."""
        cache = self.cache
        lease = cache.claim(key, tokens, len(tokens), True, retention)
        computed = num_found = lease.num_cached_tokens
        cache.begin(lease, len(tokens))
        while computed < len(tokens):
            self.step += 1
            step, end = (
                StepId(self.step),
                computed + cache.clip(lease, computed, len(tokens) - computed),
            )
            assert not isinstance(cache.extend(lease, computed, end, step), Refusal)
            cache.announce(lease, tokens, end, step)
            cache.commit_step(step)
            cache.commit(lease, tokens, end, step)
            computed = end
        cache.release(lease, Ending.FINISHED)
        for copy in cache.take_copies():
            if copy.source is not copy.target:
                cache.acknowledge(CopyDone(copy.copy_id, np.ones(len(copy.target_units), bool)))
        if self.step % 16 == 0:
            audit(cache)
        return num_found // PAGE

    def fresh(self, num_pages: int) -> Int32s:
        """Tokens of no earlier request: so many pages, and one token more."""
        self.next_token += num_pages * PAGE + 1
        return np.arange(self.next_token - num_pages * PAGE - 1, self.next_token, dtype=np.int32)

    def after(self, prefix: Int32s, num_pages: int) -> Int32s:
        return np.concatenate([prefix[: len(prefix) // PAGE * PAGE], self.fresh(num_pages)])

    def found(self, tokens: Int32s) -> int:
        return self.cache.lookup(BASE, np.append(tokens, np.int32(7))).num_pages


def with_hot_prefix(served: Served, num_pages: int, num_uses: int = 3) -> Int32s:
    hot = served.fresh(num_pages)[:-1]
    for _ in range(num_uses):
        served.ask(served.after(hot, 1))
    return hot


@pytest.mark.parametrize("num_once", [20, 1000])
@pytest.mark.parametrize("num_pages", [4, 10, 24])
def test_prompts_that_come_once_do_not_flush_a_hot_prefix(num_once: int, num_pages: int) -> None:
    served = Served(100)
    hot = with_hot_prefix(served, num_pages)
    for _ in range(num_once):
        assert served.ask(served.fresh(6)) == 0
    assert served.found(hot) == num_pages
    audit(served.cache)


def test_lru_is_flushed_by_them() -> None:
    """What it is compared with, and that the test above tests something."""
    served = Served(100, Eviction.LRU)
    hot = with_hot_prefix(served, 10)
    for _ in range(20):
        served.ask(served.fresh(6))
    assert served.found(hot) == 0


def test_a_prompt_asked_again_as_it_is_is_shared_too() -> None:
    """Nothing of it is new, so that requests part nowhere; also where it fills no further page."""
    served = Served(100)
    faq = served.fresh(8)
    assert [served.ask(faq) for _ in range(3)] == [0, 8, 8]
    for _ in range(100):
        served.ask(served.fresh(6))
    assert served.found(faq[:-1]) == 8


def test_a_long_prefix_in_several_steps_is_kept_whole() -> None:
    """Its nodes form a chain, and requests part only at the last one. When that node is evicted,
    the prefix before it is no less shared."""
    served = Served(100)
    hot = served.fresh(20)[:-1]
    for end in (8, 16, 20):
        served.ask(hot[: end * PAGE])  # leaves nodes of 8, 8 and 4 pages
    for _ in range(3):
        served.ask(served.after(hot, 1))
    tails = served.cache.evictors[0]
    tails.evict(served.cache.index.pools[0].num_cached - 14)  # takes its last node
    assert 8 < served.found(hot) <= 16
    kept = served.found(hot)
    for _ in range(50):
        served.ask(served.fresh(6))
    assert served.found(hot) >= kept - 1


def test_a_talk_is_not_taken_for_a_shared_prefix() -> None:
    """Each turn goes on where the last one ended: its pages go by their last use alone."""
    talks = {e: Served(60, e) for e in Eviction}
    found = {}
    for eviction, served in talks.items():
        said = [served.fresh(2)[:-1] for _ in range(12)]
        hits = []
        for _ in range(6):
            for i in range(len(said)):
                said[i] = np.concatenate([said[i], served.fresh(1)[:-1]])
                hits.append(served.ask(said[i]))
        found[eviction] = hits
    assert found[Eviction.FORKS] == found[Eviction.LRU]


def test_another_hot_set_takes_the_place_of_one_that_is_not_used_any_more() -> None:
    """Within a bounded number of requests: two rounds, though the old ones fill their share."""
    served = Served(100)
    old = [with_hot_prefix(served, 10) for _ in range(9)]
    for _ in range(20):
        for hot in old:
            served.ask(served.after(hot, 1))
    new = [served.fresh(10)[:-1] for _ in range(7)]
    for _ in range(4):
        for hot in new:
            served.ask(served.after(hot, 1))
    assert [served.found(hot) for hot in new] == [10] * 7


def test_work_that_is_reused_late_wins_back_the_room_of_dead_forks() -> None:
    """The old forks are dead, and talks need nearly the whole pool. What LRU would have found is
    missed at first; that shrinks the share, and soon nothing is missed."""
    served = Served(120)
    for _ in range(12):
        with_hot_prefix(served, 8, num_uses=4)
    talks = [served.fresh(9)[:-1] for _ in range(10)]
    rounds = []
    for _ in range(12):
        talks = [np.concatenate([talk, served.fresh(0)]) for talk in talks]
        rounds.append(sum(served.ask(talk) for talk in talks))
    assert rounds[-1] >= 10 * 9, rounds
    assert served.cache.forks is not None
    assert served.cache.forks.share < START


def test_however_hot_the_shared_prefixes_are_new_work_can_be_found_again() -> None:
    """They never get the whole pool: what comes now stays for a while."""
    served = Served(200)
    hot = [with_hot_prefix(served, 19) for _ in range(10)]
    for _ in range(30):
        for prefix in hot:
            served.ask(served.after(prefix, 1))
    assert served.cache.forks is not None
    assert served.cache.forks.share <= MOST
    talk = served.fresh(10)[:-1]
    served.ask(talk)
    for prefix in hot[:5]:
        served.ask(served.after(prefix, 1))
    assert served.found(talk) >= 9


@pytest.mark.parametrize(
    "families",
    [
        (FULL_ATTENTION, SlidingWindow("window", 2 * PAGE, PAGE)),
        (FULL_ATTENTION, RecurrentState("recurrent", interval=1)),
        (SlidingWindow("window", 2 * PAGE, PAGE),),
    ],
)
def test_every_family_keeps_what_a_hot_prefix_is_resumed_from(families: tuple[Family, ...]) -> None:
    served = Served(100, families=families)
    hot = with_hot_prefix(served, 8, num_uses=4)
    for _ in range(60):
        served.ask(served.fresh(6))
    assert served.found(hot) == 8
    audit(served.cache)


def test_the_host_keeps_hot_prefixes_too() -> None:
    served = Served(30, num_host_pages=100)
    hot = with_hot_prefix(served, 8, num_uses=4)
    for _ in range(60):
        served.ask(served.fresh(6))
    served.cache.evictors[0].evict(served.cache.index.pools[0].num_cached)
    assert served.found(hot) == 8
    audit(served.cache)


def test_n18_forks_of_a_namespace_are_evicted_page_by_page_like_all_others() -> None:
    """N18: nothing stands for the namespace itself, in no queue and in no pool."""
    served = Served(40)
    tenant = PrefixKey(Namespace(adapter=None, salt="tenant"))
    hot = served.fresh(8)[:-1]
    for _ in range(4):
        served.ask(served.after(hot, 1), tenant)
    served.cache.evictors[0].evict(served.cache.index.pools[0].num_cached)
    audit(served.cache)
    assert served.cache.stats().planes[0].num_free == 40
    assert not served.cache.index.tree.by_namespace
    assert served.ask(served.after(hot, 1), tenant) == 0


def test_the_share_moves_by_what_it_won_and_lost() -> None:
    forks = ForkShare(1000)
    name = name_of(1, BASE.at(0), b"page")
    forks.found(25)
    assert forks.share == pytest.approx(START + 0.1)
    forks.evicted_early(name, last_used=7, num_pages=50, num_kept=100)
    forks.published(name_of(2, BASE.at(0), b"page"))
    forks.published(name_of(1, BASE.at(0), b"another"))
    assert forks.share == pytest.approx(START + 0.1)
    forks.published(name)
    assert forks.share == pytest.approx(START - 0.1)
    forks.published(name)
    assert forks.share == pytest.approx(START - 0.1), "one loss counts once"
    forks.found(10_000)
    assert forks.share == MOST
    for i in range(50):
        lost = name_of(i, None, b"")
        forks.evicted_early(lost, i, 100, num_kept=1000)
        forks.published(lost)
    assert forks.share == LEAST


def test_lru_would_have_no_more_early_pages_than_forks_are_kept() -> None:
    forks = ForkShare(1000)
    names = [name_of(i, None, b"") for i in range(10)]
    for i, name in enumerate(names):
        forks.evicted_early(name, last_used=100 + i, num_pages=10, num_kept=30)
    assert forks.horizon == 106, "what LRU would have evicted by now"
    forks.published(names[6])
    assert forks.share == START
    forks.published(names[7])
    assert forks.share < START


def test_memory_for_what_was_evicted_early_is_bounded() -> None:
    forks = ForkShare(10**9)
    for i in range(MAX_NAMES + 100):
        forks.evicted_early(name_of(i, None, b""), i, 1, num_kept=10**9)
    assert forks.horizon == 99


SCRIPT = """
from manyroots.simulate.hit_rates import Replay
from manyroots.cache.policies import Eviction
from manyroots.cache.keys import PrefixKey
from manyroots.simulate.paths import kept_tokens
from manyroots.simulate.synthetic import synthetic_trace
from manyroots.simulate.traffic import sequences
replay = Replay(Eviction.FORKS, 600, 16)
found = []
for s in sequences(synthetic_trace("chat", seed=1, num_requests=200)):
    key = PrefixKey(s.namespace())
    found.append(replay.serve(key, kept_tokens(s), s.line.num_prompt_tokens))
pool = replay.cache.index.pools[0]
print(found, pool.free_units().tolist(), pool.indexed.nonzero()[0].tolist())
print(replay.cache.forks.share, replay.cache.forks.horizon)
"""


def test_n17_two_processes_with_other_hash_seeds_evict_the_same() -> None:
    """N17: ties break on numbers, and checksums are the same everywhere."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4711")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000
