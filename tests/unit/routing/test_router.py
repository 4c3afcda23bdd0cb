"""The router's choices: cached pages, adapters, queues, and what it learns."""

from __future__ import annotations

import random

import pytest

from manyroots.errors import UnavailableError
from manyroots.ids import AdapterDigest, Namespace, Tier
from manyroots.routing.adapter_places import AdapterPlaces
from manyroots.routing.page_index import PageIndex
from manyroots.routing.prompt_hashes import PromptHasher
from manyroots.routing.router import (
    DISPLACEMENT,
    ReplicaLimits,
    Router,
    RouteRequest,
    RoutingPolicy,
)

LIMITS = ReplicaLimits(page_size=16, max_num_seqs=4, max_loras=2, max_cpu_loras=4)
PAGES = list(range(100, 120))


def request(
    pages: list[int] = PAGES, adapter: str | None = None, session: str | None = None
) -> RouteRequest:
    return RouteRequest(pages, 16 * len(pages) + 3, adapter, session)


def test_m02_a_search_by_halves_finds_what_a_scan_finds() -> None:
    rng = random.Random(3)
    for _ in range(200):
        num_pages = rng.randint(1, 40)
        depths = [rng.randint(0, num_pages) for _ in range(rng.randint(1, 12))]
        index = PageIndex(len(depths))
        for replica, depth in enumerate(depths):
            index.store(replica, Tier.DEVICE, range(depth))
        found = [index.num_leading(r, Tier.DEVICE, range(num_pages)) for r in range(len(depths))]
        assert found == depths


def test_m02_removed_pages_are_not_counted() -> None:
    index = PageIndex(2)
    index.store(0, Tier.DEVICE, PAGES)
    index.store(1, Tier.DEVICE, PAGES)
    index.remove(0, Tier.DEVICE, PAGES[5:])
    assert index.leading(Tier.DEVICE, PAGES) == [(3, 5), (2, 20)]
    index.forget(1)
    assert index.leading(Tier.DEVICE, PAGES) == [(1, 5)]
    assert len(index) == 5


def test_m02_a_request_goes_where_its_prefix_is() -> None:
    router = Router(3, LIMITS)
    router.stored(2, Tier.DEVICE, PAGES[:15])
    router.stored(1, Tier.DEVICE, PAGES[:4])
    assert router.choose(request()) == 2


def test_m02_a_lower_tier_counts_less_than_the_device_and_more_than_nothing() -> None:
    router = Router(3, LIMITS)
    router.stored(0, Tier.HOST, PAGES)
    assert router.choose(request()) == 0
    router.stored(1, Tier.DEVICE, PAGES)
    assert router.choose(request()) == 1


def test_m02_a_long_queue_outweighs_a_cached_prefix() -> None:
    router = Router(2, LIMITS)
    router.stored(0, Tier.DEVICE, PAGES)
    for number in range(3):
        router.begin(number, 0, request([1000 * number + i for i in range(20)]))
    assert router.choose(request()) == 1
    for number in range(3):
        router.first_token(number, 0.1)
        router.end(number)
    assert router.choose(request()) == 0


def test_m02_namespaces_have_hashes_of_their_own() -> None:
    hasher = PromptHasher(b"model", 16)
    prompt = list(range(50))
    adapter = AdapterDigest(b"a" * 32)
    spaces = [Namespace(None, None), Namespace(adapter, None), Namespace(adapter, "tenant")]
    found = [hasher.hashes(prompt, space) for space in spaces]
    assert [len(hashes) for hashes in found] == [3, 3, 3]
    assert len({page for hashes in found for page in hashes}) == 9


def test_m02_a_burst_with_one_prefix_goes_to_one_replica() -> None:
    """Pages of requests under way count before any event has told of them."""
    router = Router(4, ReplicaLimits(page_size=16, max_num_seqs=256))
    first = router.choose(request())
    router.begin(1, first, request())
    assert router.choose(request([*PAGES, 1, 2])) == first
    router.end(1)  # it was aborted: nothing came
    assert len(router.pages) == 0


def test_m02_a_request_goes_where_its_adapter_is() -> None:
    router = Router(3, LIMITS)
    router.begin(1, 2, request([1], "pirate"))
    router.end(1)
    assert router.choose(request([5, 6], "pirate")) == 2


def test_m04_an_adapters_replicas_follow_its_traffic() -> None:
    places = AdapterPlaces(8, max_loras=4, max_cpu_loras=8)
    for _ in range(100):
        places.use(0, "busy")
        places.use(1, "rare-1")
        places.use(1, None)
    assert (places.target("busy"), places.target("unknown")) == (4, 1)
    for _ in range(20_000):
        places.use(1, None)
    assert places.target("busy") == 1


def test_m04_the_least_recently_used_adapters_leave_the_device_and_the_host() -> None:
    places = AdapterPlaces(1, max_loras=2, max_cpu_loras=3)
    for name in "abcd":
        places.use(0, name)
    assert [places.on_device(name) for name in "abcd"] == [0, 0, 1, 1]
    assert [places.on_host(name) for name in "abcd"] == [0, 1, 1, 1]


def test_m02_a_session_is_a_hint_and_no_promise() -> None:
    router = Router(3, LIMITS)
    router.begin(1, 1, request([1], session="s"))
    router.end(1)
    assert router.choose(request([7, 8], session="s")) == 1
    router.stored(0, Tier.DEVICE, PAGES)
    assert router.choose(request(session="s")) == 0


def test_m03_a_replica_that_is_down_gets_nothing_and_one_that_is_back_starts_empty() -> None:
    router = Router(2, LIMITS)
    router.stored(0, Tier.DEVICE, PAGES)
    router.set_up(0, is_up=False)
    router.lost(0)
    assert router.choose(request()) == 1
    router.set_up(1, is_up=False)
    with pytest.raises(UnavailableError, match="no replica is up"):
        router.choose(request())
    router.set_up(0, is_up=True)
    assert router.choose(request()) == 0
    assert len(router.pages) == 0


def test_m03_a_slow_replica_gets_less() -> None:
    router = Router(2, LIMITS)
    for number in range(20):
        router.begin(number, number % 2, request([100 * number + i for i in range(20)]))
        router.first_token(number, 3.0 if number % 2 else 0.01)
        router.end(number)
    assert [router.choose(request([1000 + i])) for i in range(5)] == [0] * 5


def test_m02_the_choice_is_the_least_sum_replica_by_replica() -> None:
    """Decisions work on all replicas at once; this adds up each replica's costs by itself."""
    rng = random.Random(11)
    for _ in range(40):
        router = random_router(rng)
        for number in range(30):
            asked = random_request(rng)
            costs = [plain_cost_s(router, replica, asked) for replica in range(router.num_replicas)]
            chosen = router.choose(asked)
            assert costs[chosen] == pytest.approx(min(costs), rel=1e-12)
            router.begin(1000 + number, chosen, asked)


def random_request(rng: random.Random) -> RouteRequest:
    """One of a few prompts that share their starts, with one of a few adapters."""
    pages = [*range(rng.randint(0, 12)), *(100 * rng.randint(1, 3) + i for i in range(8))]
    adapter = rng.choice([None, "a", "b", "c", "d", "e"])
    return RouteRequest(pages, 16 * len(pages) + rng.randint(1, 16), adapter)


def random_router(rng: random.Random) -> Router:
    """Some replicas that have served requests, of which some still run; one may be down."""
    router = Router(rng.randint(2, 70), LIMITS)
    for number in range(60):
        asked, replica = random_request(rng), rng.randrange(router.num_replicas)
        router.begin(number, replica, asked)
        if rng.random() < 0.7:
            router.stored(replica, Tier.DEVICE, asked.hashes)
        if rng.random() < 0.3:
            router.stored(rng.randrange(router.num_replicas), Tier.HOST, asked.hashes)
        if rng.random() < 0.8:
            router.first_token(number, rng.random())
            router.end(number)
    router.set_up(rng.randrange(router.num_replicas), is_up=rng.random() < 0.5)
    return router


def plain_cost_s(router: Router, replica: int, asked: RouteRequest) -> float:
    """What `router.py` says a request costs on a replica, less a load of its adapter's files."""
    token_s = float(router._token_s[replica])
    on_device, on_host = (
        router.pages.num_leading(replica, tier, asked.hashes) for tier in (Tier.DEVICE, Tier.HOST)
    )
    loaded = max(0, on_host - on_device) * (1.0 - router.costs.lower_tier_share)
    num_tokens = asked.num_tokens - 16 * (on_device + loaded)
    cost_s = float(router._first_s[replica]) + num_tokens * token_s
    if asked.adapter is None:
        return cost_s
    places, seconds = router.adapters, router.costs.adapter_s
    is_settled = places.on_host(asked.adapter).bit_count() >= places.target(asked.adapter)
    tier = Tier.STORAGE
    if places.on_device(asked.adapter) >> replica & 1:
        tier = Tier.DEVICE
    elif places.on_host(asked.adapter) >> replica & 1:
        tier = Tier.HOST
    saved_s = seconds[Tier.STORAGE] - seconds[tier]
    return cost_s - saved_s * (1.0 + DISPLACEMENT * is_settled)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(RoutingPolicy.ROUND_ROBIN, [0, 1, 2, 0]), (RoutingPolicy.LEAST_QUEUE, [1, 2, 1, 2])],
)
def test_the_policies_to_compare_with_ignore_pages(
    policy: RoutingPolicy, expected: list[int]
) -> None:
    router = Router(3, LIMITS, policy=policy)
    if policy is RoutingPolicy.LEAST_QUEUE:
        router.begin(90, 0, request([1]))
        router.begin(91, 0, request([2]))
    router.stored(0, Tier.DEVICE, PAGES)
    chosen = []
    for number in range(4):
        chosen.append(router.choose(request()))
        router.begin(number, chosen[-1], request())
    assert chosen == expected
