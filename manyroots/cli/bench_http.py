"""`manyroots bench http`: what the server adds to a token."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_at_least, check_positive, ints
from manyroots.cli.flags import engine_values


def add_http(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "http",
        _http,
        help="what HTTP adds to a token, compared with the same engine without it",
        description="Runs the same requests over HTTP and through an engine without it, in turn. "
        "Prints tokens per second of both, the wall time added to a token, and the CPU time of "
        "each process, which does not depend on other load.",
        has_engine=True,
    )
    group.add_argument(
        "--streams", type=ints, default=(64,), metavar="LIST",
        help="streams open at once; those beyond --max-num-seqs wait",
    )  # fmt: skip
    group.add_argument("--prompt-len", type=int, default=32, metavar="TOKENS", help="[32]")
    group.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="[64]")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument(
        "--pin", action="store_true",
        help="pin engines to one core, the server and the load to the others",
    )  # fmt: skip


def _http(values: dict[str, Any]) -> Report:
    from manyroots.bench.http_cost import HttpWorkload, run_http

    check_positive(values, ("prompt_len", "output_len", "repeats"))
    check_at_least("streams", min(values["streams"]), 1)
    workload = HttpWorkload(
        streams=values["streams"],
        prompt_len=values["prompt_len"],
        output_len=values["output_len"],
        repeats=values["repeats"],
        is_pinned=values["pin"],
    )
    return run_http(workload, engine_values(values))
