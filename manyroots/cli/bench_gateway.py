"""`manyroots bench gateway`: what a gateway adds to a token."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_positive
from manyroots.cli.flags import engine_values


def add_gateway(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "gateway",
        _gateway,
        help="what a gateway adds to a first token and to the CPU time of each token",
        description="Runs the same requests through a server without a gateway, one with a "
        "gateway in its API process, and one with the router in its own process; one engine each. "
        "Prints the time to the first token and the CPU time per token of all processes.",
        has_engine=True,
    )
    group.add_argument("--first-tokens", type=int, default=40, metavar="N", help="a turn [40]")
    group.add_argument("--streams", type=int, default=16, metavar="N", help="at once [16]")
    group.add_argument("--prompt-len", type=int, default=64, metavar="TOKENS", help="[64]")
    group.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="[64]")
    group.add_argument("--repeats", type=int, default=5, metavar="N", help="turns [5]")


def _gateway(values: dict[str, Any]) -> Report:
    from manyroots.bench.gateway_cost import GatewayWorkload, run_gateway

    names = ("first_tokens", "streams", "prompt_len", "output_len", "repeats")
    check_positive(values, names)
    workload = GatewayWorkload(
        num_first=values["first_tokens"],
        streams=values["streams"],
        prompt_len=values["prompt_len"],
        output_len=values["output_len"],
        repeats=values["repeats"],
    )
    return run_gateway(workload, engine_values(values))
