"""`manyroots simulate TRACE`: what settings would give on a trace, without a model or a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyroots.cli.bench_values import report_file

if TYPE_CHECKING:
    from manyroots.simulate.job import SimulationJob
    from manyroots.simulate.sweep import Axis


def add_simulate_command(commands: Any) -> None:
    simulate = commands.add_parser(
        "simulate", help="replay a trace on a simulated machine, to size a deployment"
    )
    simulate.add_argument(
        "trace", metavar="TRACE", nargs="+",
        help="JSONL file in our format or Mooncake's, or a generated trace: chat, adapters, "
        "rollouts, agents, scans, documents, reasoning, hot_documents, many_adapters, "
        "adapter_talks, adapter_scans or shifting. Several only with --hit-rates, --states or "
        "--memory-splits",
    )  # fmt: skip
    engine = simulate.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    engine.add_argument(
        "--num-pages", type=int, metavar="N", help="default: what fits into the preset's memory"
    )
    engine.add_argument(
        "--window", action="append", default=[], metavar="SIZE:SHARE",
        help="sliding-window layers, as 512:5/6 for five layers of six; --num-pages is then "
        "the memory of this many pages of all layers, split as in the engine",
    )  # fmt: skip
    engine.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="with --window or --one-memory: the longest request",
    )
    engine.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    engine.add_argument("--long-prefill-token-threshold", type=int, metavar="N")
    engine.add_argument("--no-enable-prefix-caching", action="store_true")

    engine.add_argument("--scheduling-policy", default="fcfs", metavar="NAME")
    engine.add_argument(
        "--num-host-pages", type=int, default=0, metavar="N", help="0: no host tier"
    )
    engine.add_argument(
        "--eviction", default="forks", metavar="HOW",
        help="forks (shared prefixes last, within a learned share), or lru for comparison",
    )  # fmt: skip
    engine.add_argument(
        "--write-back", default="through", metavar="WHEN",
        help="when pages go to the host: through (at once), reused (at first reuse), eviction",
    )  # fmt: skip
    engine.add_argument("--storage", action="store_true", help="add a storage tier below the host")
    engine.add_argument(
        "--prefetch", default="wait", metavar="HOW",
        help="whether a request waits for storage: best-effort (no), wait or timeout",
    )  # fmt: skip
    engine.add_argument("--prefetch-timeout-steps", type=int, default=32, metavar="N")
    engine.add_argument("--max-loras", type=int, default=0, metavar="N", help="0: no limit")
    engine.add_argument(
        "--adapter-memory", type=float, default=None, metavar="GIB",
        help="device memory that adapters share, as with --max-loras auto; default: no limit",
    )  # fmt: skip
    engine.add_argument(
        "--one-memory", action="store_true",
        help="pages and adapters share memory; --num-pages and --adapter-memory are the start",
    )  # fmt: skip
    engine.add_argument("--max-cpu-loras", type=int, default=0, metavar="N", help="0: no limit")

    engine.add_argument(
        "--speculate", type=int, default=0, metavar="N",
        help="guess up to N tokens of a row in each step; 0: none",
    )  # fmt: skip
    engine.add_argument(
        "--acceptance", type=float, default=0.7, metavar="P",
        help="with --speculate: the probability that a guess is right if all before it are",
    )  # fmt: skip

    machine = simulate.add_argument_group("machine")
    machine.add_argument("--preset", default="h200-qwen3-8b", metavar="NAME")
    machine.add_argument(
        "--cost", action="append", default=[], metavar="NAME=VALUE", help="override one cost of it"
    )

    machine.add_argument(
        "--replicas", type=int, metavar="N",
        help="this many engines and a router; compares the routing policies",
    )  # fmt: skip

    traffic = simulate.add_argument_group("traffic")
    traffic.add_argument("--seed", type=int, default=0, metavar="N")
    traffic.add_argument("--num-requests", type=int, metavar="N", help="lines of the trace to use")
    traffic.add_argument(
        "--every", type=int, default=1, metavar="N", help="use one of every N lines"
    )
    traffic.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="make arrivals X times as fast"
    )
    traffic.add_argument("--fail-steps", type=float, default=0.0, metavar="CHANCE")
    traffic.add_argument("--fail-transfers", type=float, default=0.0, metavar="CHANCE")
    traffic.add_argument("--abort-requests", type=float, default=0.0, metavar="CHANCE")
    traffic.add_argument("--write-trace", metavar="FILE.jsonl", help="write the trace, run nothing")

    output = simulate.add_argument_group("output")
    output.add_argument(
        "--audit", action="store_true", help="check every page read, and every invariant each step"
    )
    output.add_argument(
        "--hit-rates", metavar="POOL,...",
        help="only hit rates, without time: each eviction policy, the best offline policy and an "
        "infinite cache, for pools in pages (2000), bytes (100GB) or a share of the trace (5%%)",
    )  # fmt: skip
    output.add_argument(
        "--states", metavar="POOL,...",
        help="as --hit-rates, for a model with recurrent layers: room for all pages and this many "
        "states (512), or a share of those that an infinite cache keeps (50%%)",
    )  # fmt: skip
    output.add_argument(
        "--memory-splits", type=float, metavar="GIB",
        help="mean time to the first token with this memory for pages and adapters: by fixed "
        "splits, and with one memory for both",
    )  # fmt: skip
    output.add_argument(
        "--checkpoint-interval-tokens", type=int, default=2048, metavar="N",
        help="with --states: a checkpoint at least every N prompt tokens",
    )  # fmt: skip
    output.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    output.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=V1,V2,...",
        help="compare settings; repeat it to try every combination",
    )  # fmt: skip
    output.add_argument("--plot", metavar="FILE", help="plot a sweep: .html, or .png (matplotlib)")
    simulate.set_defaults(run=_run)


def _run(arguments: dict[str, Any]) -> int:
    from manyroots.errors import ConfigError
    from manyroots.simulate.plot import check_plot
    from manyroots.simulate.sweep import parse_axis
    from manyroots.simulate.trace_file import write_trace

    if arguments["hit_rates"]:
        return _hit_rates(arguments)
    if arguments["states"]:
        return _state_rates(arguments)
    if arguments["memory_splits"]:
        return _memory_splits(arguments)
    if len(arguments["trace"]) > 1:
        raise ConfigError("several traces at once are for --hit-rates; give one.")
    arguments["trace"] = arguments["trace"][0]
    job = _job(arguments)
    axes = [parse_axis(text) for text in arguments["sweep"]]
    if arguments["replicas"] is not None:
        _check_replicas(job, axes)
    plot = Path(arguments["plot"]) if arguments["plot"] else None
    if plot is not None:
        if not axes:
            raise ConfigError("--plot shows a sweep; give --sweep NAME=V1,V2,... too.")
        check_plot(plot)
    if arguments["write_trace"]:
        write_trace(Path(arguments["write_trace"]), job.trace)
        return 0
    _say_what_is_modelled(arguments, job)
    if arguments["replicas"] is not None:
        result = _replicas(job, arguments["replicas"])
    else:
        result = _sweep(arguments["trace"], job, axes, plot) if axes else _once(job)
    if arguments["json"]:
        Path(arguments["json"]).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _job(arguments: dict[str, Any]) -> SimulationJob:
    from manyroots.simulate.costs import with_costs
    from manyroots.simulate.faults import Faults
    from manyroots.simulate.job import SimulationJob, load_trace
    from manyroots.simulate.presets import preset
    from manyroots.simulate.settings import SimulationSettings
    from manyroots.simulate.trace import sped_up

    trace = load_trace(
        arguments["trace"],
        seed=arguments["seed"],
        num_requests=arguments["num_requests"],
        every=arguments["every"],
    )
    costs = preset(arguments["preset"]).costs
    memory = arguments["adapter_memory"]
    return SimulationJob(
        trace=sped_up(trace, arguments["speedup"]),
        settings=SimulationSettings(
            block_size=arguments["block_size"],
            num_pages=arguments["num_pages"],
            windows=tuple(arguments["window"]),
            max_model_len=arguments["max_model_len"],
            max_num_seqs=arguments["max_num_seqs"],
            max_num_batched_tokens=arguments["max_num_batched_tokens"],
            long_prefill_token_threshold=arguments["long_prefill_token_threshold"],
            enable_prefix_caching=not arguments["no_enable_prefix_caching"],
            scheduling_policy=arguments["scheduling_policy"],
            num_host_pages=arguments["num_host_pages"],
            eviction=arguments["eviction"],
            write_back=arguments["write_back"],
            storage=arguments["storage"],
            prefetch=arguments["prefetch"],
            prefetch_timeout_steps=arguments["prefetch_timeout_steps"],
            max_loras=arguments["max_loras"],
            max_cpu_loras=arguments["max_cpu_loras"],
            adapter_memory_bytes=None if memory is None else memory * 2**30,
            one_memory=arguments["one_memory"],
            num_speculative_tokens=arguments["speculate"],
            acceptance=arguments["acceptance"],
        ),
        costs=with_costs(costs, dict(_parse_cost(text) for text in arguments["cost"])),
        seed=arguments["seed"],
        faults=Faults(
            failed_steps=arguments["fail_steps"],
            aborts=arguments["abort_requests"],
            failed_transfers=arguments["fail_transfers"],
        ),
        audit=arguments["audit"],
    )


def _parse_cost(text: str) -> tuple[str, float]:
    from manyroots.errors import ConfigError

    name, _, value = text.partition("=")
    try:
        return name.strip().replace("-", "_"), float(value)
    except ValueError:
        raise ConfigError(f"--cost is {text!r}; write NAME=VALUE with a number.") from None


def _say_what_is_modelled(arguments: dict[str, Any], job: SimulationJob) -> None:
    from manyroots.simulate.presets import preset

    name = arguments["preset"]
    print(f"{arguments['trace']}: {len(job.trace)} requests, seed {job.seed}")
    print(f"{name}: {preset(name).title}")
    for text in arguments["cost"]:
        print(f"  but {text}")
    for line in job.settings.with_pages(job.costs).told_split(job.costs):
        print(line)
    print()


def _once(job: SimulationJob) -> dict[str, Any]:
    from rich.console import Console

    from manyroots.simulate.offline import best_offline_hit_rate, endless_hit_rate
    from manyroots.simulate.paths import lay_out
    from manyroots.simulate.summary import summarize
    from manyroots.simulate.tables import group_table, latency_table, summary_table

    console = Console(highlight=False)
    run = job.run()
    summary = summarize(run)
    paths = lay_out(job.trace, job.settings.block_size)
    num_pages = max(capacity.num_device_units for capacity in run.settings.capacities())
    best, endless = best_offline_hit_rate(paths, num_pages), endless_hit_rate(paths)
    console.print(summary_table(summary, best, endless), "")
    console.print(latency_table(summary), "")
    console.print(group_table("adapter", summary.by_adapter))
    rates = {"best_offline_hit_rate": best, "endless_hit_rate": endless}
    return {**rates, **job.run_json(run)}


def _check_replicas(job: SimulationJob, axes: list[Axis]) -> None:
    from manyroots.errors import ConfigError
    from manyroots.simulate.faults import NO_FAULTS

    if axes or job.audit or job.faults != NO_FAULTS:
        raise ConfigError("--replicas goes with neither --sweep nor --audit nor faults.")


def _replicas(job: SimulationJob, num_replicas: int) -> dict[str, Any]:
    from rich.console import Console

    from manyroots.routing.router import RoutingPolicy
    from manyroots.simulate.replicas import simulate_replicas
    from manyroots.simulate.result_json import replicas_json
    from manyroots.simulate.tables import replica_table

    runs = [
        simulate_replicas(
            job.trace, job.settings, job.costs,
            num_replicas=num_replicas, policy=policy, seed=job.seed,
        )
        for policy in RoutingPolicy
    ]  # fmt: skip
    Console(highlight=False, soft_wrap=True, width=200).print(replica_table(runs))
    return {"num_replicas": num_replicas, "policies": [replicas_json(run) for run in runs]}


def _hit_rates(arguments: dict[str, Any]) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from manyroots.simulate.hit_rates import hit_rates
    from manyroots.simulate.tables import hit_rate_table

    rows = []
    for name in arguments["trace"]:
        job = _job({**arguments, "trace": name})
        rows += hit_rates(
            name,
            job.trace,
            [text.strip() for text in arguments["hit_rates"].split(",")],
            page_size=job.settings.block_size,
            bytes_per_token=job.costs.kv_bytes_per_token,
        )
    Console(highlight=False, soft_wrap=True, width=200).print(hit_rate_table(rows))
    if arguments["json"]:
        text = json.dumps([asdict(row) for row in rows], indent=2)
        Path(arguments["json"]).write_text(text + "\n")
    return 0


def _state_rates(arguments: dict[str, Any]) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from manyroots.errors import ConfigError
    from manyroots.simulate.state_rates import state_rates
    from manyroots.simulate.tables import state_rate_table

    if arguments["checkpoint_interval_tokens"] < 1:
        raise ConfigError(
            f"--checkpoint-interval-tokens is {arguments['checkpoint_interval_tokens']}; it must "
            "be at least 1."
        )
    rows = []
    for name in arguments["trace"]:
        job = _job({**arguments, "trace": name})
        rows += state_rates(
            name,
            job.trace,
            [text.strip() for text in arguments["states"].split(",")],
            page_size=job.settings.block_size,
            interval_tokens=arguments["checkpoint_interval_tokens"],
        )
    Console(highlight=False, soft_wrap=True, width=200).print(state_rate_table(rows))
    if arguments["json"]:
        text = json.dumps([asdict(row) for row in rows], indent=2)
        Path(arguments["json"]).write_text(text + "\n")
    return 0


def _memory_splits(arguments: dict[str, Any]) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from manyroots.simulate.memory_splits import compare_splits
    from manyroots.simulate.tables import memory_split_table

    rows = []
    for name in arguments["trace"]:
        job = _job({**arguments, "trace": name})
        rows.append(
            compare_splits(
                name, job.trace, job.settings, job.costs,
                memory_bytes=arguments["memory_splits"] * 2**30, seed=job.seed, audit=job.audit,
            )
        )  # fmt: skip
    Console(highlight=False, soft_wrap=True, width=200).print(memory_split_table(rows))
    if arguments["json"]:
        text = json.dumps([{**asdict(row), "gain": row.gain} for row in rows], indent=2)
        Path(arguments["json"]).write_text(text + "\n")
    return 0


def _sweep(
    trace_name: str, job: SimulationJob, axes: list[Axis], plot: Path | None
) -> dict[str, Any]:
    from rich.console import Console

    from manyroots.simulate.plot import write_plot
    from manyroots.simulate.tables import sweep_table

    found = job.sweep(axes)
    # A table that is cut to the terminal's width hides what was asked for.
    Console(highlight=False, soft_wrap=True, width=200).print(sweep_table(found))
    if plot is not None:
        note = f"{len(job.trace)} requests, seed {job.seed}; simulated"
        write_plot(plot, f"manyroots simulate {trace_name}", note, found)
    return job.sweep_json(found)
