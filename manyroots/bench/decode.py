"""Prefill and decode of a batch of random prompts, with and without adapters.

Through the real scheduler, cache and runner, below text and HTTP. Prefix cache off. Greedy, or as
SAMPLINGS says; the kinds are timed in turn, round by round, so that a drift is all kinds'.
Prefill is the time until the whole batch has its first token; decode is the steps from there on,
in the same run, up to the first sequence's end. Every figure is a median with its spread.
Adapters are spread over the batch in turn. Beside each figure stands how near it comes to what the
bytes of a step, or the operations of the prompts, allow at best; see `models/roofline.py`.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from manyroots.bench.drive import Timeline, drive
from manyroots.bench.floors import Floors, described
from manyroots.bench.kernel_profile import KernelTimes, kernels_of
from manyroots.bench.machine import describe_machine
from manyroots.bench.model_configs import write_config
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.recorded_drafts import RecordedDrafts
from manyroots.bench.spread import spread
from manyroots.bench.step_profile import WatchedRunner, WatchedStep, steps_by_guesses
from manyroots.config import engine_settings
from manyroots.engine.build import Engine, build_engine, free_memory
from manyroots.ids import AdapterName, RequestId
from manyroots.messages import Stats, Submit
from manyroots.models.source import resolve_source
from manyroots.sampling import SamplingParams
from manyroots.step import Runner
from manyroots.structured_outputs import StructuredOutputsParams

MARGIN_TOKENS = 64
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-p and top-k": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "penalties and logprobs": {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 5,
    },
    "half of the rows structured": {"temperature": 0},
}  # fmt: skip
STRUCTURED = "half of the rows structured"
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "count": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["small", "large", "other"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
# More items than there is time for, so that none comes to an end.
SHAPE = StructuredOutputsParams(
    json=json.dumps({"type": "array", "minItems": 10_000, "items": _ITEM})
)
"""Of every second row; the others are free, as in the greedy case."""
STEADY_TOKEN = 5
STEADY: dict[str, Any] = {"temperature": 0, "logit_bias": {STEADY_TOKEN: 100.0}}
"""With drafts every row says one token: with random weights the two best are often so close that
rounding would decide between them, and guesses would be right less often than asked."""
COLD_PROMPT_LEN = 16
COLD_SLOTS = 3
COLD_CASES = {
    "disk": range(1),
    "device": range(1),
    "disk_again_other_adapter": range(1, 2),
    "disk_third_in_a_row": range(2, 3),
    "disk_burst_of_three": range(3, 3 + COLD_SLOTS),
    "host": range(1),
}
NUM_COLD = 3 + COLD_SLOTS
"""Which adapters are asked for at once, and how many there are. The burst takes every slot, so that
the first adapter is in host memory alone after it."""
PROFILED_STEPS = 16
PRINTED_STEPS = 4
PRINTED_KERNELS = 24
"""The report has all of them."""


@dataclass(frozen=True, slots=True)
class DecodeWorkload:
    """What is run."""

    prompt_lens: tuple[int, ...]
    """One for each batch."""
    output_len: int
    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    """How many different adapters the batch uses; one case each. 0 is the base model."""
    rank: int
    repeats: int
    samplings: tuple[str, ...] = ("greedy",)
    """Names of SAMPLINGS; one case each."""
    profile: bool = False
    """Also record, after each case was timed, what its kernels took."""
    adapts_experts: bool = True
    """Whether adapters change experts, too."""
    num_layers: int | None = None
    """At most so many of the model's; None: all."""
    acceptances: tuple[float, ...] = ()
    """With drafts: the probability that a guess is right; one case each, beside one without."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Each batch, and how long its prompts are."""
        return list(zip(self.batches, self.prompt_lens, strict=True))


def run_decode(
    workload: DecodeWorkload, model_config: str, engine: dict[str, Any], *, cold: bool
) -> dict[str, Any]:
    """Measure every case; prints a table as it goes and gives the report."""
    report: dict[str, Any] = {
        "bench": "decode",
        "model_config": model_config,
        "workload": {
            **asdict(workload),
            "sampling": {name: SAMPLINGS[name] for name in workload.samplings},
            "prefix_cache": False,
        },
        "machine": describe_machine(),
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        folder = Path(home)
        settings = {
            "model": str(write_config(model_config, folder, workload.num_layers)),
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": max(workload.prompt_lens) + workload.output_len + MARGIN_TOKENS,
            "max_num_seqs": max(workload.batches),
            # The whole batch begins in one step, so that decode is decode alone.
            "max_num_batched_tokens": max(batch * length for batch, length in workload.sizes),
            **engine,
        }
        if 0 in workload.adapters:
            with _engine(settings, report, "start_s") as base:
                floors = _floors(settings, base.engine, workload)
                _run_cases(base, workload, 0, "base", report, floors)
            del base  # its memory is the next one's
        if any(workload.adapters) or cold:
            _with_adapters(workload, settings, folder, report, cold=cold)
    return report


def _with_adapters(
    workload: DecodeWorkload,
    settings: dict[str, Any],
    folder: Path,
    report: dict[str, Any],
    *,
    cold: bool,
) -> None:
    source = resolve_source(engine_settings(settings).model)
    count = max(*workload.adapters, NUM_COLD if cold else 1)
    paths = write_adapters(
        targets_of(source), folder, count, workload.rank, experts=workload.adapts_experts
    )
    lora = {
        "max_loras": 0,
        **settings,
        "enable_lora": True,
        "lora_modules": tuple(f"{_name(i)}={path}" for i, path in enumerate(paths)),
        "max_lora_rank": workload.rank,
    }
    with _engine(lora, report, "start_with_lora_s") as engine:
        floors = _floors(settings, engine.engine, workload)
        if 0 in workload.adapters:
            _run_cases(engine, workload, 0, "LoRA on, base rows only", report, floors)
        for number in workload.adapters:
            if number:
                _run_cases(engine, workload, number, f"{number} adapters", report, floors)
    del engine
    if cold:
        with _engine({**lora, "max_loras": COLD_SLOTS}, report, "start_with_few_slots_s") as few:
            report["first_token_s"], report["adapter_moves_s"] = _cold(few.engine)
            _say(f"first token of an adapter, s: {report['first_token_s']}")
            _say(f"of that, moving it, s: {report['adapter_moves_s']}")


def _floors(settings: dict[str, Any], engine: Engine, workload: DecodeWorkload) -> Floors:
    model = engine_settings(settings).model
    return Floors(model, engine.info, workload.rank, experts=workload.adapts_experts)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An engine whose steps are noted."""

    engine: Engine
    runner: WatchedRunner


@contextmanager
def _engine(settings: dict[str, Any], report: dict[str, Any], label: str) -> Iterator[_Watched]:
    # What the last engine had must be free before this one asks how much memory is left.
    free_memory()
    began = time.perf_counter()
    runners: list[WatchedRunner] = []

    def watch(runner: Runner) -> Runner:
        runners.append(WatchedRunner(runner))
        return runners[0]

    engine = build_engine(engine_settings(settings), watch)
    report[label] = round(time.perf_counter() - began, 2)
    _say(f"{label}: {report[label]} on {engine.info.device}")
    try:
        yield _Watched(engine, runners[0])
    finally:
        engine.loop.close()


def _run_cases(
    target: _Watched,
    workload: DecodeWorkload,
    num_adapters: int,
    label: str,
    report: dict[str, Any],
    floors: Floors,
) -> None:
    engine = target.engine
    for batch, prompt_len in workload.sizes:
        runs = {
            kind: _Batch(
                engine,
                prompt_len,
                batch,
                range(num_adapters),
                SAMPLINGS[kind],
                shape=SHAPE if kind == STRUCTURED else None,
            )
            for kind in workload.samplings
        }
        if workload.acceptances:
            adapters = range(num_adapters)
            runs = {"no drafts": _Batch(engine, prompt_len, batch, adapters, STEADY)}
            for acceptance in workload.acceptances:
                drafts = _Batch(engine, prompt_len, batch, adapters, STEADY, acceptance=acceptance)
                runs[f"drafts, {acceptance:g} right"] = drafts
        lines: dict[str, list[Timeline]] = {kind: [] for kind in runs}
        steps: dict[str, list[WatchedStep]] = {kind: [] for kind in runs}
        for run in runs.values():
            run.run(num_tokens=4)  # adapters to the device, graphs and buffers warm
        for _ in range(workload.repeats):
            for kind, run in runs.items():
                target.runner.watch(range(0))
                lines[kind].append(run.run(num_tokens=1 + workload.output_len))
                steps[kind] += target.runner.steps
        for kind, run in runs.items():
            case = {
                "case": label,
                "sampling": kind,
                "batch": batch,
                "prompt_len": prompt_len,
                "adapters": num_adapters,
                **decode_figures(lines[kind], batch),
                **run.drafted,
            }
            case["floors"] = floors.beside(case, workload.output_len)
            report["cases"].append(case)
            ms = case["spread"]["ms_per_step"]
            _say(
                f"{label:>24}  batch {batch:3d}  {case['decode_tokens_per_s']:9.1f} tok/s  "
                f"{case['ms_per_step']:7.3f} ms per step ({ms['least']:.3f} to {ms['most']:.3f})  "
                f"prefill {case['prefill_s']:.4f} s  {kind}"
            )
            _say(f"{'':>24}  {dict(run.drafted) or described(case['floors'])}")
            if workload.acceptances:
                case["steps_by_guesses"] = steps_by_guesses(steps[kind], batch)
                _say_steps(case["steps_by_guesses"])
            if workload.profile:
                case["kernels_per_step"], case["kernels_of_prefill"] = _profile(run)


def _say_steps(rows: list[dict[str, Any]]) -> None:
    for row in sorted(rows, key=itemgetter("steps"), reverse=True)[:PRINTED_STEPS]:
        _say(
            f"{'':>24}  {row['steps']:5d} steps with {row['guesses']:2d} guesses: "
            f"{row['ms']:.3f} ms, {row['waiting_ms']:.3f} ms before"
        )


def decode_figures(lines: list[Timeline], batch: int) -> dict[str, Any]:
    """Each sample's step is timed within its own run, and the median of them counts (B04)."""
    steps = []
    for line in lines:
        seconds, num_tokens = line.all_decoding()
        steps.append(seconds / num_tokens * batch)
    prefill = spread([line.seconds_to_all_begun for line in lines])
    ms = spread([1e3 * step for step in steps], 3)
    return {
        "prefill_s": prefill["median"],
        "decode_tokens_per_s": round(batch / ms["median"] * 1e3, 1),
        "ms_per_step": ms["median"],
        "spread": {"prefill_s": prefill, "ms_per_step": ms},
    }


def _profile(run: _Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a decode step's kernels take, again the difference of two runs; and the prefill's."""
    short = kernels_of(lambda: run.run(num_tokens=1))
    long = kernels_of(lambda: run.run(num_tokens=1 + PROFILED_STEPS))
    step = short.per_step(long, PROFILED_STEPS)
    prefill = KernelTimes().per_step(short, 1)
    for label, rows in (("a decode step", step), ("prefill", prefill)):
        _say(f"{label}, {sum(row['launches'] for row in rows):.0f} kernels:")
        for row in rows[:PRINTED_KERNELS]:
            _say(f"{row['us']:12.1f} us {row['launches']:8.2f} x  {row['kernel'][:100]}")
    return step, prefill


class _Batch:
    """The same shape of batch, run again and again with new random prompts."""

    _ids = itertools.count(1)

    def __init__(
        self,
        engine: Engine,
        prompt_len: int,
        size: int,
        adapters: range,
        sampling: dict[str, Any] | None = None,
        shape: StructuredOutputsParams | None = None,
        acceptance: float | None = None,
    ) -> None:
        """`shape`: of every second row's output. `acceptance`: the probability that a guess is
        right; None drafts nothing."""
        self._acceptance = acceptance
        # A namespace of its own: how often guesses were right is remembered by namespace.
        self._salt = None if acceptance is None else f"{acceptance:g} right"
        self.drafted: Counter[str] = Counter()
        """In all runs."""
        self._shape = shape
        self._sampling = SAMPLINGS["greedy"] if sampling is None else sampling
        self._engine = engine
        self._prompt_len = prompt_len
        self._size = size
        self._adapters = [AdapterName(_name(number)) for number in adapters]
        self._rng = np.random.default_rng(0)

    def run(self, *, num_tokens: int) -> Timeline:
        """Until every sequence of the batch has `num_tokens` tokens."""
        free = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **self._sampling)
        shaped = free
        if self._shape is not None:
            shaped = replace(free, ignore_eos=False, structured_outputs=self._shape)
        vocabulary = self._engine.info.vocab_size
        shape = (self._size, self._prompt_len)
        prompts = self._rng.integers(0, vocabulary, shape).tolist()
        names: Iterator[AdapterName | None]
        names = itertools.cycle(self._adapters) if self._adapters else itertools.repeat(None)
        submits = [
            Submit(
                RequestId(next(self._ids)), prompt, self._salt,
                shaped if place % 2 else free, 0, (), adapter=name,
            )
            for place, (prompt, name) in enumerate(zip(prompts, names, strict=False))
        ]  # fmt: skip
        speculation = self._engine.parts.scheduler.speculation
        if speculation is None:
            return drive(self._engine, submits)
        speculation.source = None
        if self._acceptance is not None:
            source = RecordedDrafts(
                self._acceptance, vocab_size=vocabulary, seed=int(next(self._ids))
            )
            for prompt in prompts:
                source.record(prompt, [STEADY_TOKEN] * num_tokens)
            speculation.source = source
        before = self._engine.loop.stats()
        line = drive(self._engine, submits)
        if self._acceptance is not None:
            self._count(before, self._engine.loop.stats())
        return line

    def _count(self, before: Stats, after: Stats) -> None:
        assert before.speculation is not None
        assert after.speculation is not None
        old, new = before.speculation, after.speculation
        self.drafted["steps"] += after.total_steps - before.total_steps
        self.drafted["drafts"] += new.total_drafts - old.total_drafts
        self.drafted["draft_tokens"] += new.total_draft_tokens - old.total_draft_tokens
        self.drafted["accepted_tokens"] += new.total_accepted_tokens - old.total_accepted_tokens


def _cold(engine: Engine) -> tuple[dict[str, float], dict[str, dict[str, list[float]]]]:
    """Time to the first token of a short request, the last of a burst, by where its adapter was;
    and how long each adapter was read and brought to the device."""
    _Batch(engine, COLD_PROMPT_LEN, 1, range(0)).run(num_tokens=4)
    seconds: dict[str, float] = {}
    moves: dict[str, dict[str, list[float]]] = {}
    for case, numbers in COLD_CASES.items():
        run = _Batch(engine, COLD_PROMPT_LEN, len(numbers), numbers)
        seconds[case] = round(run.run(num_tokens=1).seconds, 4)
        taken = moves[case] = {}
        for load in engine.loop.take_loads():
            took = round(load.seconds, 4)
            taken.setdefault(f"to_{load.target.name.lower()}", []).append(took)
    return seconds, moves


def _name(number: int) -> str:
    return f"adapter-{number}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
