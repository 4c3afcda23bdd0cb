"""`manyroots bench router`: what a routing decision costs the gateway."""

from __future__ import annotations

from typing import Any

from manyroots.bench.router import NUM_SHARED_PAGES
from manyroots.cli.bench_values import check_at_least, check_positive, report_file, written


def add_router(kinds: Any) -> None:
    router = kinds.add_parser(
        "router",
        help="CPU time of choosing a replica for a request",
        description="Prints microseconds of CPU time for a routing decision and for the "
        "bookkeeping of a request, with many replicas and known prefixes. Hashing is left out.",
    )
    group = router.add_argument_group("workload")
    group.add_argument("--replicas", type=int, default=100, metavar="N", help="[100]")
    group.add_argument(
        "--prefixes", type=int, default=1_000_000, metavar="N", help="known pages [1000000]"
    )
    group.add_argument("--pages", type=int, default=256, metavar="N", help="of a prompt [256]")
    group.add_argument("--adapters", type=int, default=300, metavar="N", help="[300]")
    group.add_argument("--decisions", type=int, default=5000, metavar="N", help="[5000]")
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    router.set_defaults(run=_router)


def _router(arguments: dict[str, Any]) -> int:
    from manyroots.bench.router import RouterWorkload, run_router

    check_positive(arguments, ("replicas", "prefixes", "adapters"))
    check_at_least("decisions", arguments["decisions"], 100)
    check_at_least("pages", arguments["pages"], NUM_SHARED_PAGES + 1)
    workload = RouterWorkload(
        num_replicas=arguments["replicas"],
        num_prefixes=arguments["prefixes"],
        num_pages=arguments["pages"],
        num_adapters=arguments["adapters"],
        num_decisions=arguments["decisions"],
    )
    return written(run_router(workload), arguments["json"])
