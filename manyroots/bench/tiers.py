"""`manyroots bench tiers`: what a hit on each tier saves, and what tiers cost where nothing hits.

`hits`: time to the first token of one prompt on an idle engine: computed, found on the device, on
the host, and in storage by an engine that was just started. `misses`: a load in which no prompt
comes twice, with tiers and without, alternately: what writing back costs. On a GPU also
`copies`, rates between device and host, and `beside`, a decoding batch with and without copies at
full rate both ways. Engine level, below text and HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manyroots.bench.drive import drive
from manyroots.bench.machine import describe_machine
from manyroots.bench.spread import spread
from manyroots.bench.tier_copies import UNIT_SHAPES, BusyLink, UnitBatches, run_copies
from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine, free_memory
from manyroots.errors import ConfigError
from manyroots.ids import RequestId
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
    """Of the load in which nothing hits."""
    miss_prompt_len: int
    miss_output_len: int
    parts: tuple[str, ...] = ("hits", "misses")
    """Of those that the module's docstring names."""
    decode_batch: int = 64
    """How many decode beside copies, `decode_len` tokens after prompts of `decode_prompt_len`."""
    decode_prompt_len: int = 512
    decode_len: int = 64
    seed: int = 0


NO_STORAGE = "none"


def run_tiers(
    workload: TierWorkload, engine: dict[str, Any], storage: str | None
) -> dict[str, Any]:
    """Measure; prints as it goes and gives the report. `storage`: None for a folder of its own,
    `NO_STORAGE` to leave storage out."""
    report: dict[str, Any] = {
        "bench": "tiers",
        "workload": asdict(workload),
        "engine": engine,
        "machine": describe_machine(),
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as folder:
        kept = None if storage == NO_STORAGE else storage or f"file://{folder}/kv"
        for part in workload.parts:
            if part == "copies":
                report[part] = run_copies(workload.repeats)
            elif part == "beside":
                report[part] = _beside(workload, engine)
            elif part == "hits":
                report[part] = _hits(workload, engine, kept)
            else:
                report[part] = _misses(workload, engine, kept)
    return report


def _beside(workload: TierWorkload, engine: dict[str, Any]) -> dict[str, Any]:
    """Decoding with copies at full rate both ways and without, alternately."""
    page = engine.get("block_size", 16)
    longest = workload.decode_prompt_len + workload.decode_len + page
    settings = {
        "max_model_len": longest, "max_num_seqs": workload.decode_batch,
        "num_gpu_blocks_override": workload.decode_batch * -(-longest // page),
        "max_num_batched_tokens": workload.decode_batch * workload.decode_prompt_len,
        "enable_prefix_caching": False, **engine,
    }  # fmt: skip
    steps: dict[str, list[float]] = {"alone": [], "beside copies": []}
    rates: list[dict[str, float]] = []
    shape = UNIT_SHAPES["pages of Qwen3-8B"]
    with _engine(settings) as built:
        link = UnitBatches(shape, num_units=200)
        rng = random.Random(workload.seed)
        for turn in range(workload.repeats + 1):
            for case, seconds in steps.items():
                busy = BusyLink(link)
                with contextlib.nullcontext() if case == "alone" else busy:
                    step = _decode_step(workload, built, rng)
                if turn:  # the first warms up
                    seconds.append(step)
                    rates += [busy.rates()] if busy.rates() else []
        link.close()
    ratios = [b / a for a, b in zip(steps["alone"], steps["beside copies"], strict=True)]
    loss = 1 - 1 / statistics.median(ratios)
    print(
        f"batch {workload.decode_batch} decoding: {1e3 * statistics.median(steps['alone']):.3f} ms "
        f"per step alone, {1e3 * statistics.median(steps['beside copies']):.3f} beside copies at "
        f"{rates[-1]} GB/s: {100 * loss:.2f}% of the tokens per second lost"
    )
    return {
        "ms_per_step": {c: spread([1e3 * s for s in v], 3) for c, v in steps.items()},
        "loss": round(loss, 4),
        "gb_per_s": rates,
    }


def _decode_step(workload: TierWorkload, engine: Engine, rng: random.Random) -> float:
    """Seconds of a step in which the whole batch decodes."""
    batch = workload.decode_batch
    prompts = [_prompt(rng, engine, workload.decode_prompt_len) for _ in range(batch)]
    seconds, num_tokens = drive(
        engine, [_submit(prompt, workload.decode_len) for prompt in prompts]
    ).all_decoding()
    return seconds / num_tokens * batch


def _hits(workload: TierWorkload, engine: dict[str, Any], storage: str | None) -> dict[str, Any]:
    page = engine.get("block_size", 16)
    pages = -(-(workload.prompt_len + page) // page)
    settings = {
        "num_gpu_blocks_override": pages * 5 // 4,
        "num_host_pages": pages * min(_HOST_PROMPTS, 2 * workload.repeats + 2),
        "max_model_len": workload.prompt_len + page, "kv_storage": storage,
        "max_num_batched_tokens": 8192, **engine,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
    with _engine(settings) as built:
        rng = random.Random(workload.seed)
        prompts = [_prompt(rng, built, workload.prompt_len) for _ in range(workload.repeats + 1)]
        _ask(built, prompts[0])  # warms up; the last of all to be measured again
        for prompt in prompts[1:]:
            seconds["computed"].append(_timed(built, prompt, "computed", pages * page))
            seconds["device"].append(_timed(built, prompt, "device", pages * page))
            _ask(built, _prompt(rng, built, workload.prompt_len))  # pushes it from the device
            seconds["host"].append(_timed(built, prompt, "host", pages * page))
    if storage is not None:
        with _engine(settings) as built:
            _ask(built, prompts[0])
            seconds["storage"] = [
                _timed(built, prompt, "storage", pages * page) for prompt in prompts[1:]
            ]
    return _told_times(workload, seconds)


def _told_times(workload: TierWorkload, seconds: dict[str, list[float]]) -> dict[str, Any]:
    computed = statistics.median(seconds["computed"])
    figures: dict[str, Any] = {}
    for tier, samples in seconds.items():
        share = statistics.median(samples) / computed
        figures[tier] = {
            "seconds": spread(samples), "times_faster": round(1 / share, 2),
            "share_of_computing": round(share, 4),
        }  # fmt: skip
        print(
            f"{workload.prompt_len} tokens, {tier:8}: first token after "
            f"{statistics.median(samples):8.4f} s ({min(samples):.4f} to {max(samples):.4f}), "
            f"{share:.3f} of computing, {1 / share:6.1f} times as fast",
            flush=True,
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


def _misses(workload: TierWorkload, engine: dict[str, Any], storage: str | None) -> dict[str, Any]:
    page = engine.get("block_size", 16)
    longest = workload.miss_prompt_len + workload.miss_output_len
    pages = -(-longest // page)
    shared = {
        "num_gpu_blocks_override": pages * (workload.miss_requests + 8), "max_num_seqs": 8,
        "max_model_len": longest + page, **engine,
    }  # fmt: skip
    host = {"num_host_pages": pages * 2 * workload.miss_requests}
    kinds: dict[str, dict[str, Any]] = {"without": {}, "host": host}
    if storage is not None:
        kinds["storage"] = {**host, "kv_storage": storage}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    busy: dict[str, list[float]] = {name: [] for name in kinds}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(_engine(shared | tiers)) for name, tiers in kinds.items()
        }
        without = engines["without"]
        rng = random.Random(workload.seed + 1)
        for turn in range(workload.repeats + 1):
            prompts = [
                _prompt(rng, without, workload.miss_prompt_len)
                for _ in range(workload.miss_requests)
            ]
            for name, one in engines.items():
                submits = [_submit(prompt, workload.miss_output_len) for prompt in prompts]
                begin = time.process_time()
                line = drive(one, submits)
                if turn:  # the first warms up
                    seconds[name].append(line.seconds)
                    busy[name].append(time.process_time() - begin)
    figures: dict[str, Any] = {
        "without": {
            "seconds": spread(seconds["without"]), "processor_seconds": spread(busy["without"]),
        }
    }  # fmt: skip
    for name in list(kinds)[1:]:
        ratios = [a / b for a, b in zip(seconds[name], seconds["without"], strict=True)]
        cost, costs = statistics.median(ratios) - 1, spread([ratio - 1 for ratio in ratios])
        # Of all threads; on a GPU, of those that feed it. Says more where others use the machine.
        ratios = [a / b for a, b in zip(busy[name], busy["without"], strict=True)]
        processor_cost = statistics.median(ratios) - 1
        figures[name] = {
            "seconds": spread(seconds[name]), "cost": round(cost, 4), "costs": costs,
            "processor_seconds": spread(busy[name]), "processor_cost": round(processor_cost, 4),
        }  # fmt: skip
        print(
            f"nothing hits, tiers down to {name}: {100 * cost:+.2f}% of the time without "
            f"({100 * costs['least']:+.2f}% to {100 * costs['most']:+.2f}%), "
            f"{100 * processor_cost:+.2f}% of the processor's"
        )
    return figures


def _prompt(rng: random.Random, engine: Engine, length: int) -> list[int]:
    return [rng.randrange(engine.info.vocab_size // 2) for _ in range(length)]


def _ask(engine: Engine, prompt: list[int]) -> float:
    submit = _submit(prompt, 1)
    return drive(engine, [submit]).requests[submit.request_id].to_first_s


def _submit(prompt: Sequence[int], num_tokens: int) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Submit(RequestId(next(_IDS)), prompt, None, sampling, 0, (), None)


@contextlib.contextmanager
def _engine(settings: dict[str, Any]) -> Iterator[Engine]:
    # What the last engine had must be free before this one asks how much memory is left.
    free_memory()
    engine = build_engine(engine_settings(settings))
    try:
        yield engine
    finally:
        engine.loop.close()
