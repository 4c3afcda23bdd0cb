"""`manyroots bench tiers`: what a hit on each tier saves, and what a miss costs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.cli.bench_values import check_positive, report_file, written
from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file
from manyroots.config import ENGINE_ROOMS

PARTS = ("copies", "beside", "hits", "misses")


def add_tiers(kinds: Any) -> None:
    tiers = kinds.add_parser(
        "tiers",
        help="first tokens from device, host and storage; what tiers cost without hits",
        description="Prints how long the first token of a prompt takes that is computed, or found "
        "on the device, on the host or in storage (hits); tokens per second with tiers and without "
        "where nothing is found (misses); GB/s between device and host (copies); and a decode step "
        "beside such copies (beside).",
    )
    add_engine_flags(tiers)
    group = tiers.add_argument_group("workload")
    group.add_argument(
        "--part", action="append", choices=PARTS,
        help="may be repeated; hits and misses by default. copies and beside need a GPU",
    )  # fmt: skip
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS),
        help="random weights of this shape, instead of --model",
    )  # fmt: skip
    group.add_argument(
        "--without-storage", action="store_true", help="leave storage out; the host alone"
    )
    group.add_argument(
        "--prompt-len", type=int, default=2000, metavar="TOKENS", help="of the part `hits`"
    )
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts")
    group.add_argument(
        "--miss-requests", type=int, default=16, metavar="N",
        help="of the load in which no prompt comes twice",
    )  # fmt: skip
    group.add_argument(
        "--miss-prompt-len", type=int, default=256, metavar="TOKENS", help="of each of those"
    )
    group.add_argument("--miss-output-len", type=int, default=16, metavar="TOKENS", help="the same")
    group.add_argument(
        "--decode-batch", type=int, default=64, metavar="N", help="of the part `beside`"
    )
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    tiers.set_defaults(run=_run)


def _run(arguments: dict[str, Any]) -> int:
    from manyroots.bench.tiers import NO_STORAGE, TierWorkload, run_tiers

    values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
    check_positive(
        values,
        ("prompt_len", "repeats", "miss_requests", "miss_prompt_len", "miss_output_len",
         "decode_batch"),
    )  # fmt: skip
    workload = TierWorkload(
        prompt_len=values["prompt_len"],
        repeats=values["repeats"],
        miss_requests=values["miss_requests"],
        miss_prompt_len=values["miss_prompt_len"],
        miss_output_len=values["miss_output_len"],
        parts=tuple(values["part"] or ("hits", "misses")),
        decode_batch=values["decode_batch"],
    )
    engine = engine_values(values)
    storage = engine.pop("kv_storage", None)
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        if values["model_config"] is not None:
            model = write_config(values["model_config"], Path(folder))
            engine |= {"model": str(model), "load_format": "dummy"}
        report = run_tiers(workload, engine, NO_STORAGE if values["without_storage"] else storage)
    return written(report, values["json"])
