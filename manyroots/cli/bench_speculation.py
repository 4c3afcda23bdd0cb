"""`manyroots bench speculation`: drafts on real text."""

from __future__ import annotations

import json
from typing import Any

from manyroots.cli.bench_values import check_at_least, check_positive, report_file, written
from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file
from manyroots.config import ENGINE_ROOMS
from manyroots.speculative_config import parse_speculation

_DEFAULT = '{"method": "suffix", "num_speculative_tokens": 8}'


def add_speculation(kinds: Any) -> None:
    speculation = kinds.add_parser(
        "speculation",
        help="time with and without drafts, by kind of text",
        description="Runs edits, extraction, agent loops and free prose with and without drafts, "
        "one request at a time and in turn. Prints how many times faster drafts are, how many "
        "guesses were right, and how many answers have equal tokens.",
    )
    add_engine_flags(speculation)
    group = speculation.add_argument_group("workload")
    group.add_argument("--output-len", type=int, default=96, metavar="TOKENS", help="of each [96]")
    group.add_argument(
        "--adapters", type=int, default=0, metavar="N", help="random adapters, in rotation"
    )
    group.add_argument("--adapter-rank", type=int, default=16, metavar="RANK")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    speculation.set_defaults(run=_speculation)


def _speculation(arguments: dict[str, Any]) -> int:
    values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
    check_positive(values, ("output_len", "adapter_rank", "repeats"))
    check_at_least("adapters", values["adapters"], 0)
    engine = engine_values(values)
    config = engine.pop("speculative_config", None) or _DEFAULT
    parse_speculation(config)

    from manyroots.bench.speculation import SpeculationRun, run_speculation

    run = SpeculationRun(
        output_len=values["output_len"],
        repeats=values["repeats"],
        config=json.loads(config),
        num_adapters=values["adapters"],
        adapter_rank=values["adapter_rank"],
    )
    return written(run_speculation(run, engine), values["json"])
