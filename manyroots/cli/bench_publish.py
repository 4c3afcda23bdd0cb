"""`manyroots bench publish`: from an adapter's tensors to its first token, beside streams."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS, write_config
from manyroots.cli.bench_values import Report, add_bench, add_layers, check_layers, check_positive
from manyroots.cli.flags import engine_values

_NUMBERS = {
    "revisions": (20, "N", "number of times that new weights are published"),
    "rank": (16, "N", "rank of the adapter, on every projection"),
    "streams": (32, "N", "base model sequences that decode at the same time"),
    "stream_prompt_len": (512, "TOKENS", "prompt of each of those"),
    "prompt_len": (64, "TOKENS", "prompt of the request whose first token is timed"),
}


def add_publish(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "publish",
        _run,
        help="time from an adapter's tensors in memory to its first token, during decoding",
        description="Publishes revisions of an adapter from tensors in memory while other "
        "sequences decode. Prints the time to the first token of each, and the step time.",
        has_engine=True,
    )
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS),
        help="random weights of this shape, instead of --model",
    )  # fmt: skip
    add_layers(group)
    for name, (default, metavar, text) in _NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=default, metavar=metavar, help=text)
    group.add_argument(
        "--pinned", action="store_true",
        help="load each revision to the device when it is published, not for its first request",
    )  # fmt: skip


def _run(values: dict[str, Any]) -> Report:
    from manyroots.bench.publish import PublishWorkload, run_publish

    check_positive(values, tuple(_NUMBERS))
    check_layers(values)
    workload = PublishWorkload(**{name: values[name] for name in (*_NUMBERS, "pinned")})
    engine = engine_values(values)
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        if values["model_config"] is not None:
            model = write_config(values["model_config"], Path(folder), values["layers"])
            engine |= {"model": str(model), "load_format": "dummy"}
        return run_publish(workload, engine)
