"""`manyroots bench ...`: measure, print, and write JSON with the exact workload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS
from manyroots.cli.bench_gateway import add_gateway
from manyroots.cli.bench_host import add_host
from manyroots.cli.bench_http import add_http
from manyroots.cli.bench_kernels import add_kernels
from manyroots.cli.bench_publish import add_publish
from manyroots.cli.bench_router import add_router
from manyroots.cli.bench_routing import add_routing
from manyroots.cli.bench_speculation import add_speculation
from manyroots.cli.bench_table import add_table
from manyroots.cli.bench_tiers import add_tiers
from manyroots.cli.bench_traffic import add_serve, add_traffic
from manyroots.cli.bench_values import (
    Report,
    add_bench,
    add_layers,
    check_at_least,
    check_layers,
    check_positive,
    floats,
    ints,
)
from manyroots.cli.flags import engine_values
from manyroots.config import engine_settings
from manyroots.errors import ConfigError
from manyroots.options import flag_name


def add_bench_command(commands: Any) -> None:
    bench = commands.add_parser(
        "bench", help="measure throughput and latency",
        description="Each command prints a table. --json FILE gets every figure with its spread, "
        "the workload and the machine. docs/performance.md has measured figures.",
    )  # fmt: skip
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    _add_offline(kinds)
    _add_decode(kinds)
    add_kernels(kinds)
    add_traffic(kinds)
    add_table(kinds)
    add_serve(kinds)
    add_http(kinds)
    add_gateway(kinds)
    _add_quantization(kinds)
    add_tiers(kinds)
    add_publish(kinds)
    add_speculation(kinds)
    add_host(kinds)
    add_router(kinds)
    add_routing(kinds)
    _add_scheduler(kinds)
    _add_cache(kinds)
    _add_adapters(kinds)


def _add_offline(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "offline",
        _offline,
        help="tokens per second of a batch of prompts, compared with transformers' generate",
        description="Runs a batch of prompts with a shared prefix here and with transformers' "
        "generate (PEFT's with adapters). Prints output tokens per second, CPU time, their ratio, "
        "and how many prompts give the same tokens. On a busy machine only CPU time is "
        "meaningful; the share of other processes is printed.",
        has_engine=True,
    )
    group.add_argument("--num-prompts", type=int, default=32, metavar="N", help="[32]")
    group.add_argument(
        "--prompt-len", type=int, default=256, metavar="TOKENS", help="average length [256]"
    )
    group.add_argument(
        "--shared-len", type=int, default=192, metavar="TOKENS", help="shared prefix [192]"
    )
    group.add_argument("--output-len", type=int, default=64, metavar="TOKENS", help="of each [64]")
    group.add_argument(
        "--adapters", type=int, default=0, metavar="N",
        help="run the batch again with this many random adapters, in rotation",
    )  # fmt: skip
    group.add_argument("--adapter-rank", type=int, default=16, metavar="RANK")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument(
        "--dtypes", default="float32,bfloat16", metavar="LIST", help="one run for each"
    )
    group.add_argument(
        "--compare", choices=("transformers", "none"), default="transformers",
        help="what to compare with",
    )  # fmt: skip


def _add_decode(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "decode",
        _decode,
        help="prefill and decode of a public model's shape with random weights",
        description="Prints for each batch size and number of adapters: decoded tokens per second, "
        "milliseconds per step (min to max), seconds until all sequences have their first token, "
        "and how close that is to the limits of memory bandwidth and compute.",
        has_engine=True,
    )
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS), default="qwen3-8b", help="model shape"
    )
    add_layers(group)
    group.add_argument(
        "--prompt-len", type=ints, default=(512,), metavar="LIST",
        help="prompt tokens, for all batches or one for each",
    )  # fmt: skip
    group.add_argument(
        "--output-len", type=int, default=128, metavar="TOKENS", help="per sequence [128]"
    )
    group.add_argument(
        "--batch",
        type=ints,
        default=(1, 8, 32, 64),
        metavar="LIST",
        help="batch sizes, one case for each [1,8,32,64]",
    )
    group.add_argument(
        "--adapters", type=ints, default=(0, 1, 8), metavar="LIST",
        help="numbers of distinct adapters in a batch, one case for each; 0: base model",
    )  # fmt: skip
    group.add_argument("--adapter-rank", type=int, default=16, metavar="RANK")
    group.add_argument(
        "--adapters-without-experts", action="store_true",
        help="leave experts, most of their size, out of the adapters",
    )  # fmt: skip
    group.add_argument(
        "--adapters-cold", action="store_true",
        help="also measure the first token of an adapter on disk, in host memory, on the device",
    )  # fmt: skip
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument(
        "--profile", action="store_true", help="also print the time of a decode step by kernel"
    )
    group.add_argument(
        "--sampled",
        action="store_true",
        help="also top-p with top-k, and these with penalties and 5 logprobs",
    )
    group.add_argument(
        "--structured",
        action="store_true",
        help="also with a JSON schema for every second row (needs --tokenizer)",
    )
    group.add_argument(
        "--speculate", type=int, default=0, metavar="TOKENS",
        help="longest draft: also decode with drafts, right with each of --acceptance",
    )  # fmt: skip
    group.add_argument(
        "--acceptance", type=floats, default=(0.7,), metavar="LIST",
        help="probabilities that a drafted token is right, one case for each",
    )  # fmt: skip


def _add_quantization(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "quantization",
        _quantization,
        help="how much rounded weights change a model's distributions, on real text",
        description="Prints the mean and the 99th percentile of the KL divergence, in nats, "
        "between a model and its rounded version, and how often the likeliest token is the "
        "same. Computed by transformers on a CPU; includes a GPU's rounding of activations.",
        has_engine=True,
    )
    group.add_argument("--text", metavar="FILE", help="prose; default: a text in the package")
    group.add_argument("--tokens", type=int, default=2048, metavar="N", help="maximum number")


def _add_scheduler(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "scheduler",
        _scheduler,
        help="cost of planning without a model, compared with other schedulers",
        description="Prints hit rates, microseconds per request for submitting, planning and "
        "advancing, and milliseconds of steps in which all rows decode, in CPU time of the "
        "thread.",
    )
    group.add_argument("--requests", type=int, default=1000, metavar="N")
    group.add_argument("--prompt-len", type=int, default=4096, metavar="TOKENS")
    group.add_argument("--shared", type=float, default=0.75, metavar="SHARE", help="of each prompt")
    group.add_argument("--groups", type=int, default=32, metavar="N", help="shared prefixes")
    group.add_argument("--decode", type=int, default=8, metavar="TOKENS", help="output per request")
    group.add_argument("--budget", type=int, default=8192, metavar="TOKENS", help="per step")
    group.add_argument("--batch", type=int, default=256, metavar="N", help="sequences per step")
    group.add_argument("--burst", type=int, default=64, metavar="N", help="requests in the burst")
    group.add_argument("--decode-batches", type=ints, default=(1, 64, 256), metavar="LIST")
    group.add_argument("--waiting", type=ints, default=(0, 100, 500, 5000), metavar="LIST")
    group.add_argument("--steady-steps", type=int, default=64, metavar="N")
    group.add_argument(
        "--tenants", type=ints, default=(1, 1024, 10_000), metavar="LIST", help="waiting salts"
    )
    group.add_argument("--page-size", type=ints, default=(16, 64), metavar="LIST")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="report the median")
    group.add_argument(
        "--peer", action="append", default=[], metavar="DIR",
        help="folder with an installed tokenspeed-scheduler wheel; may be repeated",
    )  # fmt: skip


def _add_cache(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "cache",
        _cache,
        help="cost and memory of the prefix cache alone",
        description="Prints microseconds for finding, allocating, publishing and releasing one "
        "request's pages in a small pool and in a large one, and the memory of the large one.",
    )
    group.add_argument("--prompt-len", type=int, default=4096, metavar="TOKENS")
    group.add_argument("--shared", type=float, default=0.75, metavar="SHARE", help="of each prompt")
    group.add_argument("--prefixes", type=int, default=8, metavar="N")
    group.add_argument("--pages", type=int, default=4096, metavar="N", help="in the small pool")
    group.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    group.add_argument("--cycles", type=int, default=500, metavar="N", help="report the median")
    group.add_argument(
        "--large-pages", type=int, default=1_000_000, metavar="N", help="in the large pool"
    )


def _add_adapters(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "adapters",
        _adapters,
        help="rows and waits with more adapters than may run at once",
        description="Counts steps of the scheduler without a model: rows, tokens and adapters per "
        "step, and the longest wait and pause, compared with an infinite quantum.",
    )
    group.add_argument(
        "--case", action="append", default=[], metavar="NAME",
        help="rare-adapter, rare-and-long, rare-not-ahead, rare-long-not-ahead, many-adapters, "
        "on-device or on-device-packed; may be repeated, all by default",
    )  # fmt: skip
    group.add_argument("--steps", type=int, default=10_000, metavar="N")


def _adapters(values: dict[str, Any]) -> Report:
    from manyroots.bench.adapter_slices import CASES, run_slices

    names = [case.name for case in CASES]
    for name in values["case"]:
        if name not in names:
            raise ConfigError(f"--case is {name!r}; choose one of {', '.join(names)}.")
    check_at_least("steps", values["steps"], 1000)
    return run_slices(values["case"] or names, values["steps"])


def _offline(values: dict[str, Any]) -> Report:
    from manyroots.bench.offline import OfflineWorkload, run_offline

    check_positive(values, ("num_prompts", "prompt_len", "output_len", "adapter_rank", "repeats"))
    for name in ("shared_len", "adapters"):
        check_at_least(name, values[name], 0)
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
        num_adapters=values["adapters"],
        adapter_rank=values["adapter_rank"],
    )
    engine = engine_values(values)
    engine.pop("dtype", None)
    return run_offline(
        workload, engine, values["dtypes"].split(","), compare=values["compare"] == "transformers"
    )


def _decode(values: dict[str, Any]) -> Report:
    check_positive(values, ("output_len", "adapter_rank", "repeats"))
    check_layers(values)
    if values["structured"] and not values.get("tokenizer"):
        raise ConfigError(
            "--structured needs a vocabulary, which a shape alone does not have; name a "
            "tokenizer's folder or hub id with --tokenizer."
        )
    for name, low in (("batch", 1), ("adapters", 0), ("prompt_len", 1)):
        check_at_least(name, min(values[name]), low)
    check_at_least("speculate", values["speculate"], 0)
    if not all(0.0 <= share <= 1.0 for share in values["acceptance"]):
        raise ConfigError(f"--acceptance is {values['acceptance']}; each must be from 0 to 1.")
    lengths, batches = values["prompt_len"], values["batch"]
    if len(lengths) not in (1, len(batches)):
        raise ConfigError(
            f"--prompt-len has {len(lengths)} lengths and --batch {len(batches)} sizes; give one "
            "length, or one for each batch."
        )

    from manyroots.bench.decode import SAMPLINGS, STRUCTURED, DecodeWorkload, run_decode

    workload = DecodeWorkload(
        prompt_lens=lengths * len(batches) if len(lengths) == 1 else lengths,
        output_len=values["output_len"],
        batches=values["batch"],
        adapters=values["adapters"],
        rank=values["adapter_rank"],
        repeats=values["repeats"],
        samplings=tuple(
            name
            for name in SAMPLINGS
            if name == "greedy" or values["structured" if name == STRUCTURED else "sampled"]
        ),
        profile=values["profile"],
        adapts_experts=not values["adapters_without_experts"],
        num_layers=values["layers"],
        acceptances=values["acceptance"] if values["speculate"] else (),
    )
    engine = engine_values(values)
    if values["speculate"]:
        config = {"method": "suffix", "num_speculative_tokens": values["speculate"]}
        engine.setdefault("speculative_config", json.dumps(config))
    return run_decode(workload, values["model_config"], engine, cold=values["adapters_cold"])


def _quantization(values: dict[str, Any]) -> Report:
    from manyroots.bench.quantized_logits import run_quantization

    check_at_least("tokens", values["tokens"], 16)
    engine = engine_values(values)
    dtype = engine.get("dtype", "float32")
    if dtype == "auto":
        dtype = "float32"
    rounded = engine_settings({"quantization": "fp8", **engine}).model
    if rounded.quantization == "auto":
        raise ConfigError("--quantization is 'auto', which rounds nothing; choose fp8 or w4a8.")
    text = None
    if values["text"] is not None:
        try:
            text = Path(values["text"]).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--text {values['text']} can't be read: {error}") from error
    exact = replace(rounded, quantization="auto")
    return run_quantization(exact, rounded, dtype, text, values["tokens"])


def _scheduler(values: dict[str, Any]) -> Report:
    from manyroots.bench.scheduler import run_scheduler
    from manyroots.bench.scheduler_trace import SchedulerWorkload

    check_positive(values, ("requests", "prompt_len", "groups", "decode", "budget", "batch"))
    check_positive(values, ("burst", "steady_steps", "repeats"))
    for name, low in (("page_size", 1), ("decode_batches", 1), ("waiting", 0), ("tenants", 1)):
        check_at_least(name, min(values[name]), low)
    _check_shared(values)
    workload = SchedulerWorkload(
        num_requests=values["requests"],
        prompt_len=values["prompt_len"],
        shared=values["shared"],
        groups=values["groups"],
        output_len=values["decode"],
        budget=values["budget"],
        batch=values["batch"],
        burst=values["burst"],
        decode_batches=values["decode_batches"],
        waiting=tuple(sorted(values["waiting"])),
        steady_steps=values["steady_steps"],
    )
    return run_scheduler(
        workload,
        list(values["page_size"]),
        [Path(folder) for folder in values["peer"]],
        values["repeats"],
        tuple(sorted(values["tenants"])),
    )


def _cache(values: dict[str, Any]) -> Report:
    from manyroots.bench.cache import CacheWorkload, run_cache

    check_positive(values, ("prompt_len", "prefixes", "pages", "page_size", "cycles"))
    _check_shared(values)
    workload = CacheWorkload(
        prompt_len=values["prompt_len"],
        shared=values["shared"],
        prefixes=values["prefixes"],
        num_pages=values["pages"],
        page_size=values["page_size"],
        num_cycles=values["cycles"],
        num_large_pages=values["large_pages"],
    )
    num_needed = workload.num_pages_in_use
    for name in ("pages", "large_pages"):
        if values[name] < num_needed:
            raise ConfigError(
                f"{flag_name(name)} is {values[name]}; the prefixes and one request alone "
                f"need {num_needed}."
            )
    return run_cache(workload)


def _check_shared(arguments: dict[str, Any]) -> None:
    if not 0.0 <= arguments["shared"] < 1.0:
        raise ConfigError(
            f"--shared is {arguments['shared']}; it must be at least 0 and below 1: "
            "each prompt needs tokens of its own."
        )
