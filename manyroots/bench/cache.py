"""`bench cache`: the prefix cache alone, through its facade.

One request is: match, allocate, insert, free. Measured in a pool so small that every request
evicts, and in a large one that is full; the two differ by the size of the cache alone, so equal
figures mean that cost depends on a request's length and on nothing else. Memory is counted in a
process of its own. Thread CPU time, medians; a request's is followed by the least and the most of
what SLICES parts of the run give by themselves. Prints a table and gives the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from manyroots.bench.manyroots_driver import CACHE_KINDS, CacheDriver
from manyroots.bench.own_process import JobArguments, answer_from_stdin, run_module
from manyroots.bench.scheduler_trace import VOCAB_SIZE, clock
from manyroots.step import Int32s

SLICES = 5
LENGTH_FACTORS = (0.25, 1.0, 4.0)
"""Prompt lengths, of the workload's own, whose cost in the large pool is compared."""


@dataclass(frozen=True, slots=True)
class CacheWorkload:
    """What is run."""

    prompt_len: int
    shared: float
    prefixes: int
    num_pages: int
    """Pages of the small pool."""
    page_size: int
    num_cycles: int
    """Requests measured, after the pool has filled."""
    num_large_pages: int
    """Pages of the large pool."""

    @property
    def shared_len(self) -> int:
        return int(self.prompt_len * self.shared) // self.page_size * self.page_size

    @property
    def num_private_pages(self) -> int:
        """Full pages that each request adds."""
        return (self.prompt_len - self.shared_len) // self.page_size

    @property
    def num_pages_in_use(self) -> int:
        """Pages that must fit for every request to find its prefix: all of them, and a request."""
        return (self.prefixes * self.shared_len + self.prompt_len) // self.page_size + 1


def run_cache(workload: CacheWorkload) -> dict[str, Any]:
    """Every kind of cache in its small pool, then the large pool in a fresh process."""
    report: dict[str, Any] = {
        "workload": asdict(workload),
        "clock": "thread CPU time",
        "small": {kind: measure_small(workload, kind) for kind in CACHE_KINDS},
        "large": {
            kind: run_module("manyroots.bench.cache", {"workload": asdict(workload), "kind": kind})
            for kind in CACHE_KINDS
        },
    }
    print(table(report))
    return report


def measure_small(workload: CacheWorkload, kind: str) -> dict[str, Any]:
    """A pool under constant eviction."""
    cache = CacheDriver(workload.num_pages, workload.page_size, kind)
    prompts = _prompts(workload)
    _fill(cache, prompts, workload.num_pages, workload)
    return _costs(cache, prompts, workload)


def measure_large(workload: CacheWorkload, kind: str) -> dict[str, Any]:
    """A large pool: the memory it takes when full, then the same costs there."""
    prompts = _prompts(workload)
    measure_small(
        replace(workload, num_cycles=1), kind
    )  # what is imported or kept once is not ours
    before = _resident_bytes()
    cache = CacheDriver(workload.num_large_pages, workload.page_size, kind)
    _fill(cache, prompts, workload.num_large_pages, workload)
    grown = _resident_bytes() - before
    return {
        "num_cached_pages": cache.num_cached_pages,
        "resident_mb": grown / 1e6,
        "bytes_per_page": grown / max(1, cache.num_cached_pages),
        **_costs(cache, prompts, workload),
        "by_length": [
            _cost_of_length(cache, workload, int(workload.prompt_len * factor))
            for factor in LENGTH_FACTORS
        ],
    }


def _cost_of_length(
    cache: CacheDriver, workload: CacheWorkload, prompt_len: int
) -> dict[str, float]:
    """What a request of another length costs in a cache of the same size."""
    other = replace(workload, prompt_len=prompt_len, prefixes=1)
    prompts = _prompts(other)
    _fill(cache, prompts, 0, other)
    return {"prompt_len": prompt_len, "request_us": _costs(cache, prompts, other)["request_us"]}


def _fill(
    cache: CacheDriver, prompts: Iterator[Int32s], num_pages: int, workload: CacheWorkload
) -> None:
    """Requests until the pool is full, and a few more."""
    for _ in range(num_pages // max(1, workload.num_private_pages) + 2 * workload.prefixes):
        tokens = next(prompts)
        lease = cache.begin(tokens)
        cache.insert(lease, tokens)
        cache.free(lease)


def _costs(
    cache: CacheDriver, prompts: Iterator[Int32s], workload: CacheWorkload
) -> dict[str, Any]:
    """Microseconds per request, whole and in parts; and how much of each prompt was found."""
    times: dict[str, list[float]] = {
        name: [] for name in ("request", "begin", "insert", "free", "match")
    }
    for _ in range(workload.num_cycles):
        tokens = next(prompts)
        begin = clock()
        lease = cache.begin(tokens)
        cache.insert(lease, tokens)
        cache.free(lease)
        times["request"].append(clock() - begin)
    for _ in range(workload.num_cycles):
        tokens = next(prompts)
        moments = [clock()]
        lease = cache.begin(tokens)
        moments.append(clock())
        cache.insert(lease, tokens)
        moments.append(clock())
        cache.free(lease)
        moments.append(clock())
        for name, first, last in zip(
            ("begin", "insert", "free"), moments, moments[1:], strict=False
        ):
            times[name].append(last - first)
    num_found = 0
    for _ in range(workload.num_cycles):
        tokens = next(prompts)
        begin = clock()
        num_found += cache.match(tokens)
        times["match"].append(clock() - begin)
    return {
        "hit_rate": num_found / (workload.num_cycles * workload.prompt_len),
        **{f"{name}_us": statistics.median(each) * 1e6 for name, each in times.items()},
        "spread": {f"{name}_us": _slices(each) for name, each in times.items()},
    }


def _slices(seconds: list[float]) -> dict[str, float]:
    """How much a median of fewer requests differs."""
    size = max(1, len(seconds) // SLICES)
    parts = [seconds[begin : begin + size] for begin in range(0, len(seconds), size)]
    medians = [statistics.median(part) * 1e6 for part in parts]
    return {"least": min(medians), "most": max(medians)}


def _prompts(workload: CacheWorkload) -> Iterator[Int32s]:
    """The prefixes in turn, each time with a new tail."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> Int32s:
        return rng.integers(1, VOCAB_SIZE, count, dtype=np.int32)

    heads = [tokens(workload.shared_len) for _ in range(workload.prefixes)]
    while True:
        for head in heads:
            yield np.concatenate([head, tokens(workload.prompt_len - workload.shared_len)])


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS; memory can be counted on Linux only")


def table(report: dict[str, Any]) -> str:
    """One line per kind of cache and pool."""
    columns = ("hit_rate", "request_us", "match_us", "begin_us", "insert_us", "free_us")
    lines = [f"{'pool':<24}" + "".join(f"{name:>12}" for name in columns)]
    for pool in ("small", "large"):
        for kind, figures in report[pool].items():
            cells = "".join(f"{figures[name]:>12.3f}" for name in columns)
            of_request = figures["spread"]["request_us"]
            behind = f"   request {of_request['least']:.1f} to {of_request['most']:.1f} us"
            lines.append(f"{pool + ', ' + kind:<24}{cells}{behind}")
    for kind, figures in report["large"].items():
        lines.append(
            f"memory, {kind}: {figures['num_cached_pages']} cached pages take "
            f"{figures['resident_mb']:.0f} MB ({figures['bytes_per_page']:.0f} bytes each)"
        )
        costs = ", ".join(
            f"{each['prompt_len']} tokens {each['request_us']:.1f} us"
            for each in figures["by_length"]
        )
        lines.append(f"by length, {kind}, large pool: {costs}")
    return "\n".join(lines)


def _work(job: JobArguments) -> dict[str, Any]:
    return measure_large(CacheWorkload(**job["workload"]), job["kind"])


if __name__ == "__main__":
    answer_from_stdin(_work)
