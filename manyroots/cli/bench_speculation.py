"""`manyroots bench speculation`: drafts on real text."""

from __future__ import annotations

import json
from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_at_least, check_positive
from manyroots.cli.flags import engine_values
from manyroots.speculative_config import parse_speculation

_DEFAULT = '{"method": "suffix", "num_speculative_tokens": 8}'


def add_speculation(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "speculation",
        _speculation,
        help="time with and without drafts, by kind of text",
        description="Runs edits, extraction, agent loops and free prose with and without drafts, "
        "one request at a time and in turn. Prints how many times faster drafts are, how many "
        "guesses were right, and how many answers have equal tokens.",
        has_engine=True,
    )
    group.add_argument("--output-len", type=int, default=96, metavar="TOKENS", help="of each [96]")
    group.add_argument(
        "--adapters", type=int, default=0, metavar="N", help="random adapters, in rotation"
    )
    group.add_argument("--adapter-rank", type=int, default=16, metavar="RANK")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")


def _speculation(values: dict[str, Any]) -> Report:
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
    return run_speculation(run, engine)
