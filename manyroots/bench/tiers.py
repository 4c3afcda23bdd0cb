"""`manyroots bench tiers`: what a hit on each tier saves, and what tiers cost where nothing hits.

Time to the first token of one prompt on an idle engine: computed, found on the device, on the host,
and in storage by an engine that was just started. Then a load in which no prompt comes twice, with
tiers and without, turn and turn about: what writing back costs. Engine level, below text and HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manyroots.bench.drive import drive
from manyroots.bench.machine import describe_machine
from manyroots.bench.spread import spread
from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine
from manyroots.errors import ConfigError
from manyroots.ids import Namespace, RequestId
from manyroots.messages import Stats, Submit
from manyroots.sampling import SamplingParams

_IDS = itertools.count(1)
_HOST_PROMPTS = 12
"""Host memory for so many prompts; the device has room for one and a quarter."""


@dataclass(frozen=True, slots=True)
class TierWorkload:
    """What is asked of the engine."""

    prompt_len: int
    repeats: int
    miss_requests: int
    """Of the load in which nothing hits; 0 leaves it out."""
    miss_prompt_len: int
    miss_output_len: int
    seed: int = 0


def run_tiers(
    workload: TierWorkload, engine: dict[str, Any], storage: str | None
) -> dict[str, Any]:
    """Measure; prints as it goes and gives the report. `storage`: None for a folder of its own."""
    report: dict[str, Any] = {
        "bench": "tiers",
        "workload": asdict(workload),
        "engine": engine,
        "machine": describe_machine(),
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        kept = storage or f"file://{folder}/kv"
        report["hits"] = _hits(workload, engine, kept)
        if workload.miss_requests:
            report["misses"] = _misses(workload, engine, kept)
    return report


def _hits(workload: TierWorkload, engine: dict[str, Any], storage: str) -> dict[str, Any]:
    page = engine.get("block_size", 16)
    pages = -(-(workload.prompt_len + page) // page)
    settings = {
        "num_gpu_blocks_override": pages * 5 // 4, "num_host_pages": pages * _HOST_PROMPTS,
        "max_model_len": workload.prompt_len + page, "kv_storage": storage,
        "max_num_batched_tokens": 8192, **engine,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "storage": []}
    with _engine(settings) as built:
        rng = random.Random(workload.seed)
        prompts = [_prompt(rng, built, workload.prompt_len) for _ in range(workload.repeats + 1)]
        _ask(built, prompts[0])  # warms up; the last of all to be measured again
        for prompt in prompts[1:]:
            seconds["computed"].append(_timed(built, prompt, "computed", pages * page))
            seconds["device"].append(_timed(built, prompt, "device", pages * page))
            _ask(built, _prompt(rng, built, workload.prompt_len))  # pushes it from the device
            seconds["host"].append(_timed(built, prompt, "host", pages * page))
    with _engine(settings) as built:
        _ask(built, prompts[0])
        for prompt in prompts[1:]:
            seconds["storage"].append(_timed(built, prompt, "storage", pages * page))
    computed = statistics.median(seconds["computed"])
    figures: dict[str, Any] = {}
    for tier, samples in seconds.items():
        times_faster = computed / statistics.median(samples)
        figures[tier] = {"seconds": spread(samples), "times_faster": round(times_faster, 2)}
        print(
            f"{workload.prompt_len} tokens, {tier:8}: first token after "
            f"{statistics.median(samples):8.4f} s, {times_faster:6.1f} times as fast as computing"
        )
    return figures


def _timed(engine: Engine, prompt: list[int], tier: str, most: int) -> float:
    """Time to the first token, which must have come the way it is said to."""
    before = engine.loop.stats()
    seconds = _ask(engine, prompt)
    after = engine.loop.stats()
    found = after.total_hit_tokens - before.total_hit_tokens
    from_host = after.total_host_hit_tokens - before.total_host_hit_tokens
    is_as_said = {
        "computed": found == 0,
        "device": found > 0 and from_host == 0,
        "host": from_host > most // 2,
        "storage": from_host > most // 2,
    }[tier]
    if not is_as_said:
        raise ConfigError(
            f"a prompt that should come from the {tier} had {found} of its tokens cached, "
            f"{from_host} of them below the device: {_told(after)}. Storage that was used before, "
            "or tiers that are slower than computing, can't be measured here."
        )
    return seconds


def _told(stats: Stats) -> str:
    return f"missed {stats.missed_tokens}, storage {stats.storage}"


def _misses(workload: TierWorkload, engine: dict[str, Any], storage: str) -> dict[str, Any]:
    page = engine.get("block_size", 16)
    longest = workload.miss_prompt_len + workload.miss_output_len
    pages = -(-longest // page)
    shared = {
        "num_gpu_blocks_override": pages * (workload.miss_requests + 8), "max_num_seqs": 8,
        "max_model_len": longest + page, **engine,
    }  # fmt: skip
    tiers = {"num_host_pages": pages * 2 * workload.miss_requests, "kv_storage": storage}
    seconds: dict[str, list[float]] = {"without": [], "host": [], "storage": []}
    with (
        _engine(shared) as without,
        _engine(shared | {"num_host_pages": tiers["num_host_pages"]}) as host,
        _engine(shared | tiers) as both,
    ):
        rng = random.Random(workload.seed + 1)
        engines = {"without": without, "host": host, "storage": both}
        for turn in range(workload.repeats + 1):
            prompts = [
                _prompt(rng, without, workload.miss_prompt_len)
                for _ in range(workload.miss_requests)
            ]
            for name, one in engines.items():
                submits = [_submit(prompt, workload.miss_output_len) for prompt in prompts]
                line = drive(one, submits)
                if turn:  # the first warms up
                    seconds[name].append(line.seconds)
    figures: dict[str, Any] = {"without": {"seconds": spread(seconds["without"])}}
    for name in ("host", "storage"):
        ratios = [a / b for a, b in zip(seconds[name], seconds["without"], strict=True)]
        cost = statistics.median(ratios) - 1
        figures[name] = {"seconds": spread(seconds[name]), "cost": round(cost, 4)}
        print(f"nothing hits, tiers down to {name}: {100 * cost:+.2f}% of the time without")
    return figures


def _prompt(rng: random.Random, engine: Engine, length: int) -> list[int]:
    return [rng.randrange(engine.info.vocab_size // 2) for _ in range(length)]


def _ask(engine: Engine, prompt: list[int]) -> float:
    submit = _submit(prompt, 1)
    return drive(engine, [submit]).requests[submit.request_id].to_first_s


def _submit(prompt: Sequence[int], num_tokens: int) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    base = Namespace(adapter=None, salt=None)
    return Submit(RequestId(next(_IDS)), prompt, base, sampling, 0, (), None)


@contextlib.contextmanager
def _engine(settings: dict[str, Any]) -> Iterator[Engine]:
    engine = build_engine(engine_settings(settings))
    try:
        yield engine
    finally:
        engine.loop.close()
