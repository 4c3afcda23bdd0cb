"""`manyroots bench kernels`: single kernels on a model's shape."""

from __future__ import annotations

from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS
from manyroots.cli.bench_values import (
    check_at_least,
    check_positive,
    ints,
    report_file,
    written,
)
from manyroots.errors import ConfigError

PARTS = ("products", "readers", "decodes", "prompts")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_kernels(kinds: Any) -> None:
    kernels = kinds.add_parser(
        "kernels",
        help="single kernels on a model's shape, each compared with its reference",
        description="Prints for each kernel the microseconds of one call (min to max), bytes and "
        "operations per second of the least that it must read and multiply, and `off`: its "
        "largest difference from the reference as a share of the largest number. Weights and pages "
        "rotate, so that none is cached. Exits with code 1 if a kernel fails or differs.",
    )
    group = kernels.add_argument_group("workload")
    group.add_argument(
        "--model-config", choices=tuple(MODEL_CONFIGS), default="qwen3-8b", help="model shape"
    )
    group.add_argument(
        "--part", action="append", choices=PARTS,
        help="products with weights, what reads them (a norm, an activation), attention of "
        "decodes, attention of prompts; may be repeated; default: all",
    )  # fmt: skip
    group.add_argument(
        "--rows", type=ints, default=(8, 64, 128, 256), metavar="LIST", help="for products, readers"
    )
    group.add_argument(
        "--decodes", default="8x576,64x576,128x576,256x576,256x64-1280,16x16000", metavar="LIST",
        help="decoding sequences, as NUMBERxCONTEXT in tokens",
    )  # fmt: skip
    group.add_argument(
        "--prompts", default="8192,8192@7808,4096,16x512", metavar="LIST",
        help="prompts, as [NUMBERx]TOKENS[@TOKENS before it]",
    )  # fmt: skip
    group.add_argument(
        "--fp8", action="store_true", help="weights in FP8 with a scale for each row"
    )
    group.add_argument(
        "--adapters", type=int, default=0, metavar="N",
        help="adapters spread over the rows; products then shrink, and readers expand",
    )  # fmt: skip
    group.add_argument("--adapter-rank", type=int, default=16, metavar="RANK")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median")
    group.add_argument("--json", type=report_file, metavar="FILE", help="write the result here")
    kernels.set_defaults(run=_run)


def _run(arguments: dict[str, Any]) -> int:
    check_positive(arguments, ("repeats", "adapter_rank"))
    check_at_least("rows", min(arguments["rows"]), 1)
    check_at_least("adapters", arguments["adapters"], 0)
    parts = tuple(arguments["part"] or PARTS)
    if arguments["fp8"] and arguments["part"] and "readers" in parts:
        raise ConfigError("--part readers is measured without --fp8; leave one of them out.")
    if arguments["adapters"] and arguments["adapter_rank"] % 8:
        raise ConfigError(
            f"--adapter-rank is {arguments['adapter_rank']}; kernels take multiples of 8 (a GPU "
            "fills up others with zeros)."
        )

    import torch

    from manyroots.bench.kernel_attention import Sequences
    from manyroots.bench.kernels import KernelWorkload, run_kernels

    lists = {name: tuple(arguments[name].split(",")) for name in ("decodes", "prompts")}
    for texts in lists.values():
        for text in texts:
            Sequences.read(text)
    kind = arguments["device"]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here; use --device cpu.")
    if arguments["fp8"]:
        parts = tuple(part for part in parts if part != "readers")
    dtype = arguments["dtype"]
    workload = KernelWorkload(
        model_config=arguments["model_config"],
        parts=parts,
        rows=arguments["rows"],
        dtype={"cuda": "bfloat16", "cpu": "float32"}[kind] if dtype == "auto" else dtype,
        is_fp8=arguments["fp8"],
        num_adapters=arguments["adapters"],
        adapter_rank=arguments["adapter_rank"],
        repeats=arguments["repeats"],
        **lists,
    )
    report = run_kernels(workload, torch.device(kind))
    written(report, arguments["json"])
    return 0 if report["all_agree"] else 1
