"""How long one kernel takes, and whether its numbers are right.

Takes calls that do the same with other memory, enough of it that nothing is still in a cache; gives
microseconds of one of them with their spread. On a GPU the calls are a captured graph, as in a
step; on a CPU they follow each other. A kernel that fails, or is further from its reference than
`kernels/tolerances.py` allows, is reported and stops no other kernel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyroots.bench.spread import spread
from manyroots.kernels.tolerances import TOLERANCES

Calls = Sequence[Callable[[], Any]]
COLD_BYTES = 320 * 2**20
"""That are read before anything is read again: several times a GPU's level-2 cache."""
MOST_COPIES = 16
ROUND_S = 0.01
"""A round of calls takes at least about so long: a GPU's clock is read in whole microseconds."""
MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape."""

    part: str
    name: str
    rows: str
    """How many, in words that the command line takes."""
    way: str
    """Ours as it is served, or the library's."""
    num_bytes: float
    """That one call must read at least."""
    num_flops: float
    tolerance: str
    """Its row in the table of tolerances."""

    @property
    def label(self) -> str:
        return f"{self.part:>9} {self.name:>8} {self.rows:>12} {self.way:>8}"


def num_copies(num_bytes: float, *, most: int = MOST_COPIES) -> int:
    """How many of something this large are read in turn so that each is cold."""
    return min(most, max(2, -(-COLD_BYTES // max(1, round(num_bytes)))))


def measured(
    case: KernelCase,
    make: Callable[[], Calls],
    compare: Callable[[Any], tuple[Tensor, Tensor]],
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """A row of the report, printed, too. `compare` takes what the first call gave; gives that and
    what the reference gives."""
    row: dict[str, Any] = {"part": case.part, "name": case.name, "rows": case.rows, "way": case.way}
    try:
        calls = make()
        actual, expected = compare(calls[0]())
        row |= _difference(case.tolerance, actual, expected)
        us = _microseconds(calls, repeats, device)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]
        _say(f"{case.label}  FAILED {row['failed']}")
        return row
    row |= {
        "us": us,
        "gb_per_s": round(case.num_bytes / us["median"] / 1e3, 1),
        "tflop_per_s": round(case.num_flops / us["median"] / 1e6, 3),
    }
    _say(
        f"{case.label}  {us['median']:9.1f} us ({us['least']:.1f} to {us['most']:.1f})  "
        f"{row['gb_per_s']:8.1f} GB/s  {row['tflop_per_s']:8.3f} TFLOP/s  off {row['off']:.1e}"
        + ("" if row["agrees"] else "  DIFFERS FROM ITS REFERENCE")
    )
    return row


def _difference(name: str, actual: Tensor, expected: Tensor) -> dict[str, Any]:
    """`off`: the largest difference, as a share of the largest number."""
    allowed = TOLERANCES[name, actual.dtype]
    mine, right = actual.float(), expected.float()
    off = (mine - right).abs()
    agrees = bool((off <= allowed.atol + allowed.rtol * right.abs()).all())
    return {"off": float(off.max() / right.abs().max().clamp(min=1e-9)), "agrees": agrees}


def _microseconds(calls: Calls, repeats: int, device: torch.device) -> dict[str, Any]:
    run = _graph_of(calls) if device.type == "cuda" else _one_by_one(calls)
    run(1)
    rounds = max(1, min(MOST_ROUNDS, round(ROUND_S / max(run(1), 1e-6))))
    samples = [run(rounds) / rounds / len(calls) * 1e6 for _ in range(repeats)]
    return spread(samples, 2)


def _one_by_one(calls: Calls) -> Callable[[int], float]:
    def run(rounds: int) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        return time.perf_counter() - began

    return run


def _graph_of(calls: Calls) -> Callable[[int], float]:
    for call in calls:  # compiles, and makes what is made once
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def run(rounds: int) -> float:
        begin, end = _event(), _event()
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return run


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
