"""`manyroots bench routing`: what routing gives, served and simulated."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_positive, ints
from manyroots.cli.flags import engine_values
from manyroots.errors import ConfigError

_RANGES = ("turns", "system_tokens", "question_tokens")
_NUMBERS = ("replicas", "adapters", "conversations", "output_len", "concurrency", "page_size")


def add_routing(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "routing",
        _routing,
        help="hit rate, adapter loads and queues of replicas, served and simulated",
        description="Serves conversations with many adapters by replicas whose pools together hold "
        "half of what they need, by expected time to first token and by round robin. Simulates the "
        "same requests, and prints both with their goals. Exits with code 1 if a goal is missed.",
        has_engine=True,
        is_failure=_misses_goal,
    )
    group.add_argument("--replicas", type=int, default=3, metavar="N", help="[3]")
    group.add_argument("--adapters", type=int, default=30, metavar="N", help="[30]")
    group.add_argument("--conversations", type=int, default=90, metavar="N", help="[90]")
    group.add_argument("--turns", type=ints, default=(2, 8), metavar="MIN,MAX", help="[2,8]")
    group.add_argument(
        "--system-tokens", type=ints, default=(200, 1000), metavar="MIN,MAX", help="[200,1000]"
    )
    group.add_argument(
        "--question-tokens", type=ints, default=(100, 500), metavar="MIN,MAX", help="[100,500]"
    )
    group.add_argument("--output-len", type=int, default=6, metavar="TOKENS", help="[6]")
    group.add_argument("--concurrency", type=int, default=6, metavar="N", help="requests [6]")
    group.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="[16]")
    group.add_argument("--trace-seed", type=int, default=0, metavar="N", help="[0]")


def _routing(values: dict[str, Any]) -> Report:
    from manyroots.bench.routing import RoutingWorkload, run_routing

    check_positive(values, _NUMBERS)
    for name in _RANGES:
        if len(values[name]) != 2 or not 1 <= values[name][0] <= values[name][1]:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {values[name]}; give the least and the most, like 2,8.")
    workload = RoutingWorkload(
        num_replicas=values["replicas"],
        num_adapters=values["adapters"],
        num_conversations=values["conversations"],
        turns=values["turns"],
        system_tokens=values["system_tokens"],
        question_tokens=values["question_tokens"],
        output_tokens=values["output_len"],
        concurrency=values["concurrency"],
        page_size=values["page_size"],
        seed=values["trace_seed"],
    )
    return run_routing(workload, engine_values(values))


def _misses_goal(report: Report) -> bool:
    return not all(goal["is_met"] for goal in report["goals"].values())
