"""`manyroots bench tiers`: what a hit on each tier saves, and what a miss costs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.cli.bench_values import Report, add_bench, check_positive
from manyroots.cli.flags import engine_values

PARTS = ("copies", "beside", "hits", "misses")


def add_tiers(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "tiers",
        _run,
        help="first tokens from device, host and storage; cost of tiers without hits",
        description="Parts: the time to the first token of a prompt that is computed, or found on "
        "the device, on the host or in storage (hits); tokens per second with and without tiers if "
        "nothing is found (misses); GB/s between device and host (copies); the time of a decode "
        "step during such copies (beside).",
        has_engine=True,
    )
    group.add_argument(
        "--part", action="append", choices=PARTS,
        help="may be repeated; default: hits and misses. copies and beside need a GPU",
    )  # fmt: skip
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS),
        help="random weights of this shape, instead of --model",
    )  # fmt: skip
    group.add_argument("--without-storage", action="store_true", help="only the host tier")
    group.add_argument(
        "--prompt-len", type=int, default=2000, metavar="TOKENS", help="for the part `hits`"
    )
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument(
        "--miss-requests", type=int, default=16, metavar="N",
        help="requests of the part `misses`, in which no prompt repeats",
    )  # fmt: skip
    group.add_argument(
        "--miss-prompt-len", type=int, default=256, metavar="TOKENS", help="for each of those"
    )
    group.add_argument("--miss-output-len", type=int, default=16, metavar="TOKENS", help="likewise")
    group.add_argument(
        "--decode-batch", type=int, default=64, metavar="N", help="for the part `beside`"
    )


def _run(values: dict[str, Any]) -> Report:
    from manyroots.bench.tiers import NO_STORAGE, TierWorkload, run_tiers

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
        return run_tiers(workload, engine, NO_STORAGE if values["without_storage"] else storage)
