"""`manyroots bench traffic` and `manyroots bench serve`: whole requests, without HTTP and with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyroots.bench.model_configs import MODEL_CONFIGS
from manyroots.cli.bench_values import (
    Report,
    add_bench,
    add_layers,
    check_at_least,
    check_layers,
    check_positive,
    check_range,
    floats,
    ints,
    range_of_ints,
)
from manyroots.cli.flags import engine_values
from manyroots.errors import ConfigError
from manyroots.options import flag_name

if TYPE_CHECKING:
    from manyroots.bench.traffic_cases import TrafficCase


def add_traffic(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "traffic",
        _traffic,
        help="whole requests of mixed sizes through the engine, without HTTP",
        description="Prints for each case the seconds until the last request ends (min to max), "
        "output tokens per second, and the time to first token (p50, p99).",
        has_engine=True,
    )
    group.add_argument(
        "--case", action="append", default=[], metavar="NAME",
        help="mixed-greedy (the default), mixed-sampled, shared-heads, long-prompts, adapters-8, "
        "adapters-32, adapters-1000 and others; a wrong name lists all; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS), default=None,
        help="a public model's shape with random weights, instead of MODEL",
    )  # fmt: skip
    add_layers(group)
    group.add_argument("--requests", type=int, default=None, metavar="N", help="maximum number")
    group.add_argument(
        "--lengths", type=float, default=1.0, metavar="FACTOR", help="multiply all lengths"
    )
    group.add_argument(
        "--with-base", action="store_true", help="also run the requests without adapters"
    )
    group.add_argument(
        "--load", type=float, default=None, metavar="SHARE",
        help="also with random arrivals at this share of the sustained rate; 0.7 is 70%%",
    )  # fmt: skip
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument("--warm-ups", type=int, default=2, metavar="N", help="runs before those")
    group.add_argument(
        "--profile", action="store_true",
        help="also print time by kind of step and, on a GPU, by kernel",
    )  # fmt: skip
    group.add_argument(
        "--one-engine", action="store_true",
        help="run all cases on one engine, with the adapters of the case that has most of them; "
        "cases must not differ in their adapters' ranks and projections",
    )  # fmt: skip


def _traffic(values: dict[str, Any]) -> Report:
    from manyroots.bench.traffic_cases import CASES

    names = values["case"] or [next(iter(CASES))]
    for name in names:
        if name not in CASES:
            raise ConfigError(f"--case is {name!r}; choose one of {', '.join(CASES)}.")
    check_layers(values)
    _check_share("lengths", values["lengths"])
    check_at_least("repeats", values["repeats"], 1)
    check_at_least("warm_ups", values["warm_ups"], 0)
    if values["requests"] is not None:
        check_at_least("requests", values["requests"], 1)
    if values["load"] is not None:
        _check_share("load", values["load"])
    cases = [CASES[name].shrunk(values["requests"], values["lengths"]) for name in names]
    sorts = {(case.ranks, case.projections) for case in cases if case.num_adapters}
    if values["one_engine"] and len(sorts) > 1:
        raise ConfigError(
            "--one-engine has cases whose adapters differ in ranks or projections; run them apart."
        )

    from manyroots.bench.traffic import TrafficRuns, run_traffic

    runs = TrafficRuns(
        values["repeats"],
        with_base=values["with_base"],
        load=values["load"],
        warm_ups=values["warm_ups"],
        profile=values["profile"],
        num_layers=values["layers"],
        one_engine=values["one_engine"],
    )
    return run_traffic(cases, runs, values["model_config"], engine_values(values))


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"{flag_name(name)} is {value}; it must be above 0 and at most 1.")


def add_serve(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "serve",
        _serve,
        help="HTTP load on this or any other OpenAI server",
        description="Sends conversations of one or more streaming requests. Prints for each "
        "arrival pattern: output tokens per second, time to first token and between tokens (p50, "
        "p99), and requests per second that met --good-first-ms and --good-between-ms. Default: "
        "64 concurrent conversations.",
    )
    group.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the server, with or without /v1 [%(default)s]",
    )
    group.add_argument("--api-key", default=None, metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="/v1/completions or /v1/chat/completions [%(default)s]",
    )
    group.add_argument("--requests", type=int, default=None, metavar="N", help="64, or the case's")
    group.add_argument(
        "--case", default=None, metavar="NAME",
        help="requests of a `bench traffic` case without adapters, as tokens; the server must "
        "support cache_salt",
    )  # fmt: skip
    group.add_argument(
        "--vocab-size", type=int, default=None, metavar="N", help="with --case: that of the model"
    )
    group.add_argument(
        "--lengths", type=float, default=1.0, metavar="FACTOR",
        help="with --case: multiply all lengths",
    )  # fmt: skip
    group.add_argument(
        "--prompt-words",
        type=range_of_ints,
        default=(64, 256),
        metavar="LOW-HIGH",
        help="words per request, uniformly random [64-256]",
    )
    group.add_argument(
        "--output-len",
        type=range_of_ints,
        default=(32, 128),
        metavar="LOW-HIGH",
        help="requested tokens, uniformly random [32-128]",
    )
    group.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="requests per conversation, each with the conversation so far [1]",
    )
    group.add_argument(
        "--shared-heads",
        type=int,
        default=0,
        metavar="N",
        help="distinct prefixes that conversations share in rotation, with --head-words [1]",
    )
    group.add_argument(
        "--head-words", type=int, default=0, metavar="WORDS", help="length of those; 0: none"
    )
    group.add_argument(
        "--ask-for", default="", metavar="NAMES",
        help="models or adapters by name, separated by commas; default: the server's first",
    )  # fmt: skip
    group.add_argument(
        "--zipf", type=float, default=0.0, metavar="EXPONENT", help="skew of names; 0: uniform"
    )
    group.add_argument("--sampled", action="store_true", help="temperature 0.7, top_p 0.8")
    group.add_argument(
        "--stop-at-end", action="store_true",
        help="do not send ignore_eos, which some servers do not support",
    )  # fmt: skip
    group.add_argument(
        "--rates",
        type=floats,
        default=(),
        metavar="LIST",
        help="random arrivals in conversations per second; one case for each",
    )
    group.add_argument(
        "--burst",
        type=int,
        default=1,
        metavar="N",
        help="with --rates: conversations that arrive together [1]",
    )
    group.add_argument(
        "--streams", type=ints, default=(), metavar="LIST",
        help="saturation: this many concurrent conversations; 64 if no rate is given either",
    )  # fmt: skip
    group.add_argument(
        "--loads", type=floats, default=(), metavar="LIST",
        help="then at these shares of the highest sustained rate; 0.3 is 30%%",
    )  # fmt: skip
    group.add_argument(
        "--good-first-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="goal: milliseconds to the first token [%(default)s]",
    )
    group.add_argument(
        "--good-between-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="goal: average milliseconds between tokens [%(default)s]",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of words, lengths, arrivals [0]"
    )
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument("--plot", metavar="FILE.html", help="plot as an HTML page")


def _serve(values: dict[str, Any]) -> Report:
    from manyroots.bench.serve import Arrivals, Promise, run_serve
    from manyroots.bench.serve_workload import ServeWorkload

    check_positive(values, ("turns", "burst", "repeats"))
    case = _case_of(values)
    num_requests = values["requests"]
    if num_requests is None:
        num_requests = 64 if case is None else case.num_requests
    check_at_least("requests", num_requests, 1)
    for name in ("prompt_words", "output_len"):
        check_range(name, values[name])
    for name in ("shared_heads", "head_words"):
        check_at_least(name, values[name], 0)
    if values["shared_heads"] and not values["head_words"]:
        raise ConfigError("--shared-heads have no words; say how many with --head-words.")
    rates, streams = values["rates"], values["streams"]
    if not rates and not streams:
        streams = (64,)
    if any(rate <= 0 for rate in rates) or any(count < 1 for count in streams):
        raise ConfigError("--rates and --streams must hold numbers above 0.")
    if any(load <= 0 for load in values["loads"]):
        raise ConfigError("--loads must hold numbers above 0; 0.3 is 30%.")
    plot = values["plot"]
    if plot is not None and not (plot.endswith(".html") and Path(plot).absolute().parent.is_dir()):
        raise ConfigError(f"--plot is {plot!r}; give a name that ends in .html, in a folder.")
    workload = ServeWorkload(
        num_requests=num_requests,
        prompt_words=values["prompt_words"],
        output_tokens=values["output_len"] if case is None else case.output_len,
        turns=values["turns"],
        num_heads=values["shared_heads"],
        head_words=values["head_words"],
        models=tuple(name for name in values["ask_for"].split(",") if name),
        zipf=values["zipf"],
        is_sampled=values["sampled"] if case is None else case.is_sampled,
        is_chat=values["endpoint"] == "chat",
        ignore_eos=not values["stop_at_end"],
        seed=values["seed"],
        case=case,
        vocab_size=values["vocab_size"] or 0,
    )
    arrivals = [Arrivals(rate=rate, burst=values["burst"]) for rate in rates]
    arrivals += [Arrivals(streams=count) for count in streams]
    promise = Promise(values["good_first_ms"] / 1e3, values["good_between_ms"] / 1e3)
    report = run_serve(
        values["url"], values["api_key"], workload, arrivals, promise, values["repeats"],
        values["loads"],
    )  # fmt: skip
    if plot is not None:
        _draw(Path(plot), report)
    return report


def _case_of(arguments: dict[str, Any]) -> TrafficCase | None:
    from manyroots.bench.traffic_cases import CASES

    name = arguments["case"]
    if name is None:
        return None
    if name not in CASES:
        raise ConfigError(f"--case is {name!r}; choose one of {', '.join(CASES)}.")
    if arguments["endpoint"] == "chat" or arguments["turns"] > 1:
        raise ConfigError("--case sends single completions; leave out --endpoint and --turns.")
    if not arguments["vocab_size"] or arguments["vocab_size"] < 1:
        raise ConfigError("--case sends tokens; say how many the model knows with --vocab-size.")
    _check_share("lengths", arguments["lengths"])
    return CASES[name].shrunk(arguments["requests"], arguments["lengths"])


def _draw(path: Path, report: dict[str, Any]) -> None:
    from manyroots.simulate.curves import COLORS, Curve, Panel
    from manyroots.simulate.plot_html import plot_html

    cases = report["cases"]
    ticks = tuple(case["arrivals"] for case in cases)

    def panel(title: str, name: str, keys: tuple[str, ...], factor: float = 1.0) -> Panel:
        lines = []
        for key, color in zip(keys, COLORS, strict=False):
            figures = [case[name][key] if key else case[name] for case in cases]
            lines.append(Curve(key, color, tuple(factor * f["median"] for f in figures)))
        return Panel(title, "arrivals", ticks, tuple(lines))

    shares = ("p50", "p90", "p99")
    shown = [
        panel("time to first token, ms", "time_to_first_token_s", shares, 1e3),
        panel("time between tokens, ms", "time_between_tokens_s", shares, 1e3),
        panel("output tokens per second", "output_tokens_per_s", ("",)),
        panel("requests per second that kept their promise", "goodput_requests_per_s", ("",)),
    ]
    note = f"{report['workload']}; promise {report['promise']}"
    path.write_text(plot_html(f"bench serve: {report['url']}", note, shown), encoding="utf-8")
