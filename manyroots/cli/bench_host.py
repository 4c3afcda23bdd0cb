"""`manyroots bench host`: what a step costs the processor, without a device."""

from __future__ import annotations

from typing import Any

from manyroots.cli.bench_values import Report, add_bench, check_at_least
from manyroots.errors import ConfigError


def add_host(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "host",
        _host,
        help="CPU time of a step, with a device that takes no time",
        description="Prints microseconds of CPU time per step, by kind of step and by part of the "
        "engine: planning, laying out inputs, packing them, reading results, publishing. Runs "
        "whole requests through the real engine, without text, HTTP or kernel launches.",
    )
    group.add_argument(
        "--case", action="append", default=[], metavar="NAME",
        help="mixed (the default), decode-256, adapters-32, adapters-1000, long-prompts and "
        "others; a wrong name lists all; may be repeated",
    )  # fmt: skip
    group.add_argument("--requests", type=int, default=None, metavar="N", help="maximum number")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")


def _host(values: dict[str, Any]) -> Report:
    check_at_least("repeats", values["repeats"], 1)
    if values["requests"] is not None:
        check_at_least("requests", values["requests"], 1)

    from manyroots.bench.host import HOST_CASES, run_host

    names = values["case"] or [next(iter(HOST_CASES))]
    for name in names:
        if name not in HOST_CASES:
            raise ConfigError(f"--case is {name!r}; choose one of {', '.join(HOST_CASES)}.")
    cases = [HOST_CASES[name].shrunk(values["requests"]) for name in names]
    return run_host(cases, values["repeats"])
