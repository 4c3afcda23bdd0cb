"""`manyroots bench publish`: from an adapter's tensors to its first token, beside streams."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.cli.bench_values import (
    add_layers,
    check_layers,
    check_positive,
    report_file,
    written,
)
from manyroots.cli.flags import add_engine_flags, engine_values, with_config_file
from manyroots.config import ENGINE_ROOMS

_NUMBERS = {
    "revisions": (20, "N", "number of times that new weights are published"),
    "rank": (16, "N", "rank of the adapter, on every projection"),
    "streams": (32, "N", "base model sequences that decode at the same time"),
    "stream_prompt_len": (512, "TOKENS", "prompt of each of those"),
    "prompt_len": (64, "TOKENS", "prompt of the request whose first token is timed"),
}


def add_publish(kinds: Any) -> None:
    publish = kinds.add_parser(
        "publish",
        help="time from an adapter's tensors in memory to its first token, during decoding",
        description="Publishes revisions of an adapter from tensors in memory while other "
        "sequences decode. Prints the time to the first token of each, and the step time.",
    )
    add_engine_flags(publish)
    group = publish.add_argument_group("workload")
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS),
        help="random weights of this shape, instead of --model",
    )  # fmt: skip
    add_layers(group)
    for name, (default, metavar, text) in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=default, metavar=metavar, help=text)
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    publish.set_defaults(run=_run)


def _run(arguments: dict[str, Any]) -> int:
    from manyroots.bench.publish import PublishWorkload, run_publish

    values = with_config_file(arguments, ENGINE_ROOMS.values(), more=set(arguments))
    check_positive(values, tuple(_NUMBERS))
    check_layers(values)
    workload = PublishWorkload(**{name: values[name] for name in _NUMBERS})
    engine = engine_values(values)
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        if values["model_config"] is not None:
            model = write_config(values["model_config"], Path(folder), values["layers"])
            engine |= {"model": str(model), "load_format": "dummy"}
        report = run_publish(workload, engine)
    return written(report, values["json"])
