"""The best offline policy: it is the best there is, by brute force and beside every other."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from manyroots.errors import ConfigError
from manyroots.simulate.hit_rates import hit_rates
from manyroots.simulate.offline import best_offline_hit_rate, endless_hit_rate
from manyroots.simulate.paths import lay_out
from manyroots.simulate.prefixes import SeenPrefixes
from manyroots.simulate.synthetic import SYNTHETIC, synthetic_trace
from manyroots.simulate.trace import Trace, TraceRequest, TraceSegment
from manyroots.simulate.traffic import sequences

PAGE = 2
Pages = frozenset[tuple[int, ...]]
"""Pages by their names: what each and all before it consist of."""


def random_trace(seed: int, num_requests: int, num_tokens: int) -> Trace:
    """Prompts of few tokens that share what they begin with; none ends with a page."""
    rng = random.Random(seed)
    return tuple(
        TraceRequest(
            arrival_s=float(i),
            prompt=tuple(rng.randint(1, 2) for _ in range(PAGE * rng.randint(1, num_tokens) + 1)),
            adapter=rng.choice((None, None, "a")),
            salt=None,
            output_tokens=1,
        )
        for i in range(num_requests)
    )


def most_hits(trace: Trace, num_pages: int) -> int:
    """By trying every way to evict, page by page, that leaves no page without those before it."""
    wanted = []
    for line in trace:
        whose = (0 if line.adapter is None else 1,)
        pages = [line.prompt[:end] for end in range(PAGE, len(line.prompt), PAGE)]
        wanted.append(frozenset((*whose, *page) for page in pages))

    def is_closed(pages: Pages) -> bool:
        return all(len(page) <= PAGE + 1 or page[:-PAGE] in pages for page in pages)

    @cache
    def most(number: int, resident: Pages) -> int:
        if number == len(trace):
            return 0
        path = wanted[number]
        found, others = len(path & resident), sorted(resident - path)
        room = num_pages - len(path)
        ways = [
            path | frozenset(kept)
            for size in range(min(room, len(others)) + 1)
            for kept in combinations(others, size)
        ]
        return found + max(most(number + 1, way) for way in ways if is_closed(way))

    return most(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_no_way_to_evict_finds_more_than_the_best_offline_policy(seed: int) -> None:
    trace = random_trace(seed, num_requests=7, num_tokens=3)
    paths = lay_out(trace, PAGE)
    total = sum(line.num_prompt_tokens for line in trace)
    for num_pages in (3, 4, 5):
        expected = most_hits(trace, num_pages) * PAGE / total
        assert best_offline_hit_rate(paths, num_pages) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
def test_no_policy_of_the_cache_beats_the_best_offline_policy(seed: int) -> None:
    trace = random_trace(seed, num_requests=120, num_tokens=8)
    rows = hit_rates("t", trace, ["9", "14", "30", "100"], page_size=PAGE, bytes_per_token=1.0)
    for row in rows:
        assert max(row.by_policy.values()) <= row.best_offline + 1e-12
        assert row.best_offline <= row.endless + 1e-12
    assert rows[0].best_offline > 1.1 * rows[0].by_policy["lru"], "no room to tell them apart"


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_an_endless_cache_finds_all_that_was_seen_before(name: str) -> None:
    trace = synthetic_trace(name, seed=2, num_requests=30)
    seen, num_hits = SeenPrefixes(16), 0
    for sequence in sequences(trace):
        prompt = sequence.line.prompt_tokens().tolist()
        num_hits += seen.match(sequence.namespace(), prompt)
        seen.add(sequence.namespace(), prompt + sequence.reply_tokens()[:-1])
    paths = lay_out(trace, 16)
    total = sum(line.n * line.num_prompt_tokens for line in trace)
    assert endless_hit_rate(paths) == pytest.approx(num_hits / total)
    roomy = sum(paths.sizes)
    assert best_offline_hit_rate(paths, roomy) == pytest.approx(num_hits / total)


def test_pages_that_are_never_used_again_go_before_all_others() -> None:
    """A hot prompt and many that come once: room for the hot one and one other is enough."""
    hot = tuple(TraceSegment("hot", 64) for _ in range(1))
    lines = [hot if i % 4 == 0 else (TraceSegment(f"once {i}", 64),) for i in range(40)]
    trace = tuple(
        TraceRequest(arrival_s=float(i), prompt=p, adapter=None, salt=None, output_tokens=1)
        for i, p in enumerate(lines)
    )
    assert best_offline_hit_rate(lay_out(trace, 16), 8) == pytest.approx(9 * 48 / (40 * 64))


def test_a_request_larger_than_the_pool_is_refused() -> None:
    trace = random_trace(0, num_requests=3, num_tokens=8)
    with pytest.raises(ConfigError, match="larger than the cache; raise --num-pages"):
        best_offline_hit_rate(lay_out(trace, PAGE), 1)
    with pytest.raises(ConfigError, match="give larger pools"):
        hit_rates("t", trace, ["1"], page_size=PAGE, bytes_per_token=1.0)
