"""`manyroots bench http`: what the server adds to a token."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import (
    check_at_least,
    check_positive,
    ints,
    report_file,
    written,
)
from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file
from manyroots.config import ENGINE_ROOMS


def add_http(kinds: Any) -> None:
    http = kinds.add_parser(
        "http",
        help="what HTTP adds to a token, beside the same engine without it",
        description="The same requests over HTTP and through an engine without it, turn and turn "
        "about. Prints tokens per second of both, what is added to a token on the wall, and the "
        "processor time of each process, which does not depend on who else computes.",
    )
    add_engine_flags(http)
    group = http.add_argument_group("workload")
    group.add_argument(
        "--streams", type=ints, default=(64,), metavar="LIST",
        help="open at once; more than --max-num-seqs wait for each other",
    )  # fmt: skip
    group.add_argument("--prompt-len", type=int, default=32, metavar="TOKENS", help="[32]")
    group.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="[64]")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    group.add_argument(
        "--pin", action="store_true",
        help="engines on a core of their own, the server and the load on the others",
    )  # fmt: skip
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    http.set_defaults(run=_http)


def _http(arguments: dict[str, Any]) -> int:
    from manyroots.bench.http_cost import HttpWorkload, run_http

    values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
    check_positive(values, ("prompt_len", "output_len", "repeats"))
    check_at_least("streams", min(values["streams"]), 1)
    workload = HttpWorkload(
        streams=values["streams"],
        prompt_len=values["prompt_len"],
        output_len=values["output_len"],
        repeats=values["repeats"],
        is_pinned=values["pin"],
    )
    return written(run_http(workload, engine_values(values)), values["json"])
