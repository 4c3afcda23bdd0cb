"""`manyroots bench router`: what a routing decision costs the gateway."""

from __future__ import annotations

from typing import Any

from manyroots.bench.router import NUM_SHARED_PAGES
from manyroots.cli.bench_values import Report, add_bench, check_at_least, check_positive


def add_router(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "router",
        _router,
        help="CPU time of choosing a replica for a request",
        description="Prints microseconds of CPU time for a routing decision and for the "
        "bookkeeping of a request, with many replicas and known prefixes. Hashing is left out.",
    )
    group.add_argument("--replicas", type=int, default=100, metavar="N", help="[100]")
    group.add_argument(
        "--prefixes", type=int, default=1_000_000, metavar="N", help="known pages [1000000]"
    )
    group.add_argument("--pages", type=int, default=256, metavar="N", help="of a prompt [256]")
    group.add_argument("--adapters", type=int, default=300, metavar="N", help="[300]")
    group.add_argument("--decisions", type=int, default=5000, metavar="N", help="[5000]")


def _router(values: dict[str, Any]) -> Report:
    from manyroots.bench.router import RouterWorkload, run_router

    check_positive(values, ("replicas", "prefixes", "adapters"))
    check_at_least("decisions", values["decisions"], 100)
    check_at_least("pages", values["pages"], NUM_SHARED_PAGES + 1)
    workload = RouterWorkload(
        num_replicas=values["replicas"],
        num_prefixes=values["prefixes"],
        num_pages=values["pages"],
        num_adapters=values["adapters"],
        num_decisions=values["decisions"],
    )
    return run_router(workload)
