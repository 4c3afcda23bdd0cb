"""`manyroots bench ...`: measure, print, and write JSON with the exact workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file


def add_bench_command(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure throughput and latency")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    offline = kinds.add_parser(
        "offline", help="tokens per second of a batch of prompts, beside transformers' generate"
    )
    add_engine_flags(offline)
    group = offline.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=32, metavar="N")
    group.add_argument("--prompt-len", type=int, default=256, metavar="TOKENS", help="on average")
    group.add_argument("--shared-len", type=int, default=192, metavar="TOKENS")
    group.add_argument("--output-len", type=int, default=64, metavar="TOKENS")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    group.add_argument(
        "--dtypes", default="float32,bfloat16", metavar="LIST", help="one run for each"
    )
    group.add_argument(
        "--compare", choices=("transformers", "none"), default="transformers",
        help="what to run beside it",
    )  # fmt: skip
    group.add_argument("--json", metavar="FILE", help="write the result here")
    offline.set_defaults(run=_offline)


def _offline(arguments: dict[str, Any]) -> int:
    from manyroots.bench.offline import OfflineWorkload, run_offline
    from manyroots.errors import ConfigError

    values = with_config_file(arguments, set(arguments))
    if values["shared_len"] >= values["prompt_len"]:
        raise ConfigError(
            f"--shared-len ({values['shared_len']}) must be below --prompt-len "
            f"({values['prompt_len']}): each prompt needs tokens of its own."
        )
    workload = OfflineWorkload(
        num_prompts=values["num_prompts"],
        prompt_len=values["prompt_len"],
        shared_len=values["shared_len"],
        output_len=values["output_len"],
        repeats=values["repeats"],
    )
    engine = engine_values(values)
    engine.pop("dtype", None)
    report = run_offline(
        workload, engine, values["dtypes"].split(","), compare=values["compare"] == "transformers"
    )
    if values["json"]:
        Path(values["json"]).write_text(json.dumps(report, indent=2) + "\n")
    return 0
