"""`bench router`: what a routing decision costs, without hashing and without a network.

Fills a router with pages of many conversations on many replicas, then routes requests that go on
with one of them. Thread CPU time; a decision is `Router.choose`, and the bookkeeping after it is
`Router.begin`, `first_token` and `end`. Prints a table and gives the report.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from manyroots.ids import Tier
from manyroots.process.gc_tuning import keep_for_good
from manyroots.routing.router import ReplicaLimits, Router, RouteRequest

PAGE_SIZE = 16
NUM_NEW_PAGES = 12
"""Of each request, beyond what its conversation has."""
NUM_SHARED_PAGES = 32
"""Of a system prompt, which many replicas have."""


@dataclass(frozen=True, slots=True)
class RouterWorkload:
    """What is run."""

    num_replicas: int
    num_prefixes: int
    """Distinct page hashes that the router knows."""
    num_pages: int
    """Pages of a conversation."""
    num_adapters: int
    num_decisions: int


def run_router(workload: RouterWorkload, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    limits = ReplicaLimits(page_size=PAGE_SIZE, max_num_seqs=256, max_loras=8, max_cpu_loras=16)
    router = Router(workload.num_replicas, limits)
    conversations = _fill(router, workload, rng)
    keep_for_good()  # as a server does when it is ready
    choose_us: list[float] = []
    note_us: list[float] = []
    for number in range(workload.num_decisions):
        pages, adapter = rng.choice(conversations)
        # New ints, as hashing has just made them.
        request = RouteRequest(
            [*(page + 0 for page in pages), *(rng.getrandbits(64) for _ in range(NUM_NEW_PAGES))],
            PAGE_SIZE * (len(pages) + NUM_NEW_PAGES) + 5,
            adapter,
        )
        begin = time.thread_time_ns()
        replica = router.choose(request)
        chosen = time.thread_time_ns()
        router.begin(number, replica, request)
        # Some are always under way.
        router.first_token(number - 1000, 0.1)
        router.end(number - 1000)
        noted = time.thread_time_ns()
        choose_us.append((chosen - begin) / 1000)
        note_us.append((noted - chosen) / 1000)
    spreads = {"choose_us": _spread(choose_us), "bookkeeping_us": _spread(note_us)}
    print(f"{workload.num_replicas} replicas, {len(router.pages):,} known prefixes, "
          f"{workload.num_adapters} adapters")  # fmt: skip
    for name, values in spreads.items():
        print(f"{name:16}" + "".join(f"  {key} {value:8.1f}" for key, value in values.items()))
    return {
        "workload": asdict(workload), "known_prefixes": len(router.pages), **spreads,
    }  # fmt: skip


def _fill(
    router: Router, workload: RouterWorkload, rng: random.Random
) -> list[tuple[list[int], str]]:
    """Conversations of all adapters: the system prompt on some replicas, the rest on one or two."""
    adapters = [f"adapter-{i}" for i in range(workload.num_adapters)]
    systems = {name: [rng.getrandbits(64) for _ in range(NUM_SHARED_PAGES)] for name in adapters}
    conversations = []
    while len(router.pages) < workload.num_prefixes:
        adapter = rng.choice(adapters)
        own = [rng.getrandbits(64) for _ in range(workload.num_pages - NUM_SHARED_PAGES)]
        pages = [*systems[adapter], *own]
        for replica in rng.sample(range(workload.num_replicas), rng.choice((1, 1, 2))):
            router.stored(replica, Tier.DEVICE, pages)
            router.adapters.use(replica, adapter)
        conversations.append((pages, adapter))
    return conversations


def _spread(values: list[float]) -> dict[str, float]:
    p50, p99 = (statistics.quantiles(values, n=100)[i] for i in (49, 98))
    return {"mean": statistics.mean(values), "p50": p50, "p99": p99, "max": max(values)}
