"""`manyroots bench kernels`: single kernels on a model's shape."""

from __future__ import annotations

from typing import Any

from manyroots.bench.model_configs import MODEL_CONFIGS
from manyroots.cli.bench_values import Report, add_bench, check_at_least, check_positive, ints
from manyroots.errors import ConfigError

PARTS = ("products", "readers", "decodes", "prompts")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_kernels(kinds: Any) -> None:
    group = add_bench(
        kinds,
        "kernels",
        _run,
        help="single kernels on a model's shape, each compared with its reference",
        description="Prints for each kernel the microseconds of one call (min to max), bytes and "
        "operations per second of the least that it must read and multiply, and `off`: its "
        "largest difference from the reference as a share of the largest number. Weights and pages "
        "rotate, so that none is cached. Exits with code 1 if a kernel fails or differs.",
        is_failure=lambda report: not report["all_agree"],
    )
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


def _run(values: dict[str, Any]) -> Report:
    check_positive(values, ("repeats", "adapter_rank"))
    check_at_least("rows", min(values["rows"]), 1)
    check_at_least("adapters", values["adapters"], 0)
    parts = tuple(values["part"] or PARTS)
    if values["fp8"] and values["part"] and "readers" in parts:
        raise ConfigError("--part readers is measured without --fp8; leave one of them out.")
    if values["adapters"] and values["adapter_rank"] % 8:
        raise ConfigError(
            f"--adapter-rank is {values['adapter_rank']}; kernels take multiples of 8 (a GPU "
            "fills up others with zeros)."
        )

    import torch

    from manyroots.bench.kernel_attention import Sequences
    from manyroots.bench.kernels import KernelWorkload, run_kernels

    lists = {name: tuple(values[name].split(",")) for name in ("decodes", "prompts")}
    for texts in lists.values():
        for text in texts:
            Sequences.read(text)
    kind = values["device"]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here; use --device cpu.")
    if values["fp8"]:
        parts = tuple(part for part in parts if part != "readers")
    dtype = values["dtype"]
    workload = KernelWorkload(
        model_config=values["model_config"],
        parts=parts,
        rows=values["rows"],
        dtype={"cuda": "bfloat16", "cpu": "float32"}[kind] if dtype == "auto" else dtype,
        is_fp8=values["fp8"],
        num_adapters=values["adapters"],
        adapter_rank=values["adapter_rank"],
        repeats=values["repeats"],
        **lists,
    )
    return run_kernels(workload, torch.device(kind))
