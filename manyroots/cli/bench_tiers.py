"""`manyroots bench tiers`: what a hit on each tier saves, and what a miss costs."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import check_at_least, check_positive, written
from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file
from manyroots.config import ENGINE_ROOMS


def add_tiers(kinds: Any) -> None:
    tiers = kinds.add_parser(
        "tiers", help="first tokens from device, host and storage; what tiers cost without hits"
    )
    add_engine_flags(tiers)
    group = tiers.add_argument_group("workload")
    group.add_argument("--prompt-len", type=int, default=2000, metavar="TOKENS")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    group.add_argument(
        "--miss-requests", type=int, default=16, metavar="N",
        help="of the load in which no prompt comes twice; 0 leaves it out",
    )  # fmt: skip
    group.add_argument("--miss-prompt-len", type=int, default=256, metavar="TOKENS")
    group.add_argument("--miss-output-len", type=int, default=16, metavar="TOKENS")
    group.add_argument("--json", metavar="FILE", help="write the result here")
    tiers.set_defaults(run=_run)


def _run(arguments: dict[str, Any]) -> int:
    from manyroots.bench.tiers import TierWorkload, run_tiers

    values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
    check_positive(values, ("prompt_len", "repeats", "miss_prompt_len", "miss_output_len"))
    check_at_least("miss_requests", values["miss_requests"], 0)
    workload = TierWorkload(
        prompt_len=values["prompt_len"],
        repeats=values["repeats"],
        miss_requests=values["miss_requests"],
        miss_prompt_len=values["miss_prompt_len"],
        miss_output_len=values["miss_output_len"],
    )
    engine = engine_values(values)
    storage = engine.pop("kv_storage", None)
    return written(run_tiers(workload, engine, storage), values["json"])
