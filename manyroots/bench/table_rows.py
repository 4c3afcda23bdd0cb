"""The rows of `manyroots bench table`: what is run, what is read from it, and what it should be.

Goals and vLLM's figures (0.25.1, with CUDA graphs, compiled, FlashAttention 3) are of one H200. On
another GPU they are a measure of nothing, and the figures count alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RunReport = dict[str, Any]
FigureSpread = tuple[float, float, float]
"""A median, the least and the most."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """One figure."""

    name: str
    goal: float
    read: Callable[[RunReport], FigureSpread]
    """From the report of its run."""
    more_is_better: bool = False
    vllm: float | None = None

    def is_met(self, figure: float) -> bool:
        return figure >= self.goal if self.more_is_better else figure <= self.goal

    def missed_by(self, figure: float) -> float:
        """As a share of the goal."""
        far = self.goal - figure if self.more_is_better else figure - self.goal
        return max(0.0, far / self.goal)


@dataclass(frozen=True, slots=True)
class TableRun:
    """One command, `manyroots bench ...`, and what is read from its report."""

    name: str
    arguments: tuple[str, ...]
    rows: tuple[TableRow, ...]


def tokens_per_s(batch: int, adapters: int = 0) -> Callable[[RunReport], FigureSpread]:
    def read(report: RunReport) -> FigureSpread:
        case = _decoded(report, batch, adapters)
        ms = case["spread"]["ms_per_step"]
        return case["decode_tokens_per_s"], 1e3 * batch / ms["most"], 1e3 * batch / ms["least"]

    return read


def share_of_base(batch: int, adapters: int) -> Callable[[RunReport], FigureSpread]:
    def read(report: RunReport) -> FigureSpread:
        base = _decoded(report, batch, 0)["decode_tokens_per_s"]
        median, least, most = tokens_per_s(batch, adapters)(report)
        return median / base, least / base, most / base

    return read


def seconds(case: str) -> Callable[[RunReport], FigureSpread]:
    def read(report: RunReport) -> FigureSpread:
        found = _of_traffic(report, case)["seconds"]
        return found["median"], found["least"], found["most"]

    return read


def first_seconds(case: str) -> Callable[[RunReport], FigureSpread]:
    """Of the server's first run, in which files are read. Without warm-ups."""

    def read(report: RunReport) -> FigureSpread:
        first = _of_traffic(report, case)["run_seconds"][0]
        return first, first, first

    return read


def warm_seconds(case: str) -> Callable[[RunReport], FigureSpread]:
    """Of the runs after the first, if there are any."""

    def read(report: RunReport) -> FigureSpread:
        runs = _of_traffic(report, case)["run_seconds"]
        warm = runs[1:] or runs
        return statistics.median(warm), min(warm), max(warm)

    return read


def first_share(case: str) -> Callable[[RunReport], FigureSpread]:
    """The base's seconds of those of the first run with adapters."""

    def read(report: RunReport) -> FigureSpread:
        found = _of_traffic(report, case)
        share = found["base"]["seconds"]["median"] / found["run_seconds"][0]
        return share, share, share

    return read


def first_token_beside(case: str, other: str) -> Callable[[RunReport], FigureSpread]:
    """p50 of the first token of one case, as a multiple of another's."""

    def read(report: RunReport) -> FigureSpread:
        of = [_of_traffic(report, name)["time_to_first_token_s"]["p50"] for name in (case, other)]
        share = of[0]["median"] / of[1]["median"]
        return share, share, share

    return read


def start_seconds(case: str) -> Callable[[RunReport], FigureSpread]:
    """Of the engine; with nothing compiled only where Triton's cache was empty."""

    def read(report: RunReport) -> FigureSpread:
        taken = _of_traffic(report, case)["start_s"]
        return taken, taken, taken

    return read


def share_of_time(case: str) -> Callable[[RunReport], FigureSpread]:
    """The base's seconds of those with adapters."""

    def read(report: RunReport) -> FigureSpread:
        share = _of_traffic(report, case)["share_of_base"]
        return share, share, share

    return read


def slowest_first(case: str) -> Callable[[RunReport], FigureSpread]:
    """p99 of the first token with adapters, as a multiple of the base's, under load."""

    def read(report: RunReport) -> FigureSpread:
        found = _of_traffic(report, case)["poisson"]
        p99 = {kind: of["time_to_first_token_s"]["p99"]["median"] for kind, of in found.items()}
        share = p99["with adapters"] / p99["base"]
        return share, share, share

    return read


def first_token(case: str) -> Callable[[RunReport], FigureSpread]:
    def read(report: RunReport) -> FigureSpread:
        taken = report["first_token_s"][case]
        return taken, taken, taken

    return read


def _decoded(report: RunReport, batch: int, adapters: int) -> dict[str, Any]:
    """Without adapters there are two cases, and the one of an engine that has none comes first."""
    found = (c for c in report["cases"] if (c["batch"], c["adapters"]) == (batch, adapters))
    case: dict[str, Any] = next(found)
    return case


def _of_traffic(report: RunReport, name: str) -> dict[str, Any]:
    [case] = (case for case in report["cases"] if case["case"] == name)
    return dict(case)


def _decode(name: str, arguments: str, *rows: TableRow, model: str = "qwen3-8b") -> TableRun:
    return TableRun(name, ("decode", "--model-config", model, *arguments.split()), rows)


def _traffic(name: str, arguments: str, *rows: TableRow) -> TableRun:
    return TableRun(name, ("traffic", "--model-config", "qwen3-8b", *arguments.split()), rows)


RUNS: tuple[TableRun, ...] = (
    _decode(
        "decode", "--adapters 0,8 --batch 8,64,128,256 --max-num-batched-tokens 32768",
        TableRow("decode, batch 8, tok/s", 1900, tokens_per_s(8), True, 1435),
        TableRow("decode, batch 64, tok/s", 10_800, tokens_per_s(64), True, 9221),
        TableRow("decode, batch 128, tok/s", 17_500, tokens_per_s(128), True),
        TableRow("decode, batch 256, tok/s", 22_000, tokens_per_s(256), True),
        TableRow("8 adapters, batch 8, of base", 0.95, share_of_base(8, 8), True, 0.57),
        TableRow("8 adapters, batch 64, of base", 0.95, share_of_base(64, 8), True, 0.60),
    ),
    _traffic(
        "mixed", "--case mixed-greedy --case mixed-sampled --warm-ups 0",
        TableRow("512 mixed, greedy, s", 10.0, seconds("mixed-greedy"), vllm=11.86),
        TableRow("512 mixed, sampled, s", 10.2, seconds("mixed-sampled"), vllm=11.77),
    ),
    _traffic(
        "adapters-8", "--case adapters-8 --case adapters-8-sampled --warm-ups 0",
        TableRow("512 mixed, 8 adapters, greedy, s", 10.9, seconds("adapters-8")),
        TableRow("512 mixed, 8 adapters, sampled, s", 11.1, seconds("adapters-8-sampled")),
    ),
    _traffic(
        "adapters-32", "--case adapters-32 --warm-ups 0 --with-base",
        TableRow("32 adapters by Zipf, first run, s", 12.9, first_seconds("adapters-32")),
        TableRow("32 adapters by Zipf, warm, s", 12.2, warm_seconds("adapters-32")),
        TableRow("start with 32 adapters, s", 20, start_seconds("adapters-32")),
    ),
    _traffic(
        "adapters-200", "--case adapters-200 --warm-ups 0 --with-base",
        TableRow("200 adapters, first run, of base", 0.88, first_share("adapters-200"), True),
        TableRow("200 adapters, warm, of base", 0.95, share_of_time("adapters-200"), True),
    ),
    _traffic(
        "adapters-16",
        "--one-engine --case adapters-16 --case adapters-8 --max-loras 8 --warm-ups 1",
        TableRow(
            "16 adapters in 8 slots, p50 of first token, of 8's", 2.0,
            first_token_beside("adapters-16", "adapters-8"),
        ),
    ),
    _decode(
        "adapters-of-rank-64", "--adapters 64 --adapter-rank 64 --batch 64",
        TableRow("64 adapters of rank 64, batch 64, tok/s", 5000, tokens_per_s(64, 64), True),
    ),
    _traffic(
        "shared-heads", "--case shared-heads --warm-ups 0",
        TableRow("256 with 16 shared heads, first run, s", 4.6, first_seconds("shared-heads")),
        TableRow(
            "256 with 16 shared heads, warm, s", 4.4, warm_seconds("shared-heads"), vllm=6.23
        ),
    ),
    _traffic(
        "long-prompts", "--case long-prompts --warm-ups 0",
        TableRow("16 prompts of 16,000, s", 8.8, seconds("long-prompts"), vllm=9.45),
    ),
    _decode(
        "fp8-decode",
        "--quantization fp8 --adapters 0 --batch 8,64 --max-num-batched-tokens 8192",
        TableRow("FP8, decode, batch 8, tok/s", 3000, tokens_per_s(8), True, 2006),
        TableRow("FP8, decode, batch 64, tok/s", 14_500, tokens_per_s(64), True, 11_344),
    ),
    _traffic(
        "fp8-traffic", "--quantization fp8 --case mixed-greedy --case long-prompts --warm-ups 0",
        TableRow("FP8, 512 mixed, s", 7.5, seconds("mixed-greedy"), vllm=9.21),
        TableRow("FP8, 16 prompts of 16,000, s", 6.6, seconds("long-prompts"), vllm=7.35),
    ),
    _decode(
        "cold-adapters", "--adapters 8 --batch 8 --adapters-cold",
        TableRow("first adapter from disk, s", 0.045, first_token("disk"), vllm=0.25),
        TableRow("third in a row, s", 0.045, first_token("disk_third_in_a_row"), vllm=0.25),
        TableRow("last of three at once, s", 0.045, first_token("disk_burst_of_three")),
    ),
    _decode(
        "experts", "--adapters 0,8 --batch 64 --adapters-cold",
        TableRow("30B-A3B, batch 64, tok/s", 4100, tokens_per_s(64), True, 3525),
        TableRow("30B-A3B, batch 64, 8 adapters, tok/s", 3550, tokens_per_s(64, 8), True, 2469),
        TableRow("30B-A3B, adapter from disk, s", 0.35, first_token("disk"), vllm=6.5),
        TableRow("30B-A3B, third in a row, s", 0.35, first_token("disk_third_in_a_row"), vllm=6.5),
        TableRow("30B-A3B, last of three at once, s", 0.35, first_token("disk_burst_of_three")),
        model="qwen3-30b-a3b",
    ),
    _traffic(
        "adapters-1000", "--case adapters-1000 --with-base --load 0.7 --warm-ups 0 --repeats 1",
        TableRow("1,000 adapters, of base", 0.88, share_of_time("adapters-1000"), True),
        TableRow("at 70% load, p99 of first token, of base", 2.0, slowest_first("adapters-1000")),
    ),
    _traffic(
        "adapters-10000", "--case adapters-10000 --with-base --load 0.7 --warm-ups 0 --repeats 1",
        TableRow("10,000 adapters, 70% load, p99, of base", 3.0, slowest_first("adapters-10000")),
    ),
)  # fmt: skip
"""Those whose figures are looked at first come first, for runs with little time."""
