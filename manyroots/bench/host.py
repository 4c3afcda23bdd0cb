"""`manyroots bench host`: the processor's share of a step, part by part; the device costs nothing.

The real loop, scheduler, cache and runner carry out whole requests; only what the device would do
is left out (`free_device.py`), and so is launching kernels one by one, which steps of more than
2048 tokens need. Every figure is processor time of the one thread that does it all, in microseconds
a step. Parts are told apart in runs of their own, since looking at the clock takes time, too.

On a GPU a step is planned and launched while the one before it computes, so that of all this only
what takes longer than the device makes a step longer.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyroots.bench.free_device import VOCAB_SIZE, FreeEngine
from manyroots.bench.machine import describe_machine
from manyroots.bench.part_times import PartTimes
from manyroots.bench.spread import percentile, spread
from manyroots.bench.traffic_cases import CASES, TrafficCase
from manyroots.config import SchedulerSettings
from manyroots.messages import Batch, FinishReason, Stats, StepOutputs, Submit
from manyroots.process.gc_tuning import kept_meanwhile
from manyroots.runner.mixed import TOKENS
from manyroots.step import Plan

MAX_NUM_SEQS = 256
BUDGET = 8192
FEW_ROWS = 64
LEAST_SHOWN_US = 0.5

Encode = Callable[[StepOutputs, Stats], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCase:
    """Requests of `bench traffic`, and what each asks of the sampler beside that."""

    name: str
    traffic: TrafficCase
    sampling: dict[str, Any]
    speculative_config: str | None = None

    def shrunk(self, num_requests: int | None) -> HostCase:
        return replace(self, traffic=self.traffic.shrunk(num_requests, 1.0))

    def submits(self) -> list[Submit]:
        ids, has_adapters = itertools.count(1), self.traffic.num_adapters > 0
        submits = self.traffic.submits(VOCAB_SIZE, "", ids, with_adapters=has_adapters)
        return [replace(s, sampling=replace(s.sampling, **self.sampling)) for s in submits]


def _case(
    name: str, traffic: str, own: dict[str, Any], drafts: str | None = None, **sampling: Any
) -> HostCase:
    traffic_case = replace(CASES[traffic], **own)
    return HostCase(name=name, traffic=traffic_case, sampling=sampling, speculative_config=drafts)


_GUESSES = '{"method": "suffix", "num_speculative_tokens": 4, "adaptive": false}'
"""All are right, since the device always says the same."""
_DECODE: dict[str, Any] = {"num_requests": 256, "output_len": (256, 256)}

HOST_CASES = {
    case.name: case
    for case in (
        _case("mixed", "mixed-greedy", {}),
        _case("sampled", "mixed-sampled", {}),
        _case("adapters-8", "adapters-8", {}),
        _case("adapters-32", "adapters-32", {}),
        _case("adapters-1000", "adapters-1000", {}),
        _case("long-prompts", "long-prompts", {}),
        _case("shared-heads", "shared-heads", {}),
        _case("decode-256", "streams-64", {**_DECODE, "prompt_len": (64, 1024)}),
        _case("logprobs", "streams-64", {}, logprobs=5),
        _case("penalties", "streams-64", {}, frequency_penalty=0.5),
        _case("guesses-1", "streams-64", {"num_requests": 1, "output_len": (1024, 1024)}, _GUESSES),
        _case("guesses-8", "streams-64", {"num_requests": 8, "output_len": (1024, 1024)}, _GUESSES),
        _case("four-of-each", "mixed-sampled", {"num_heads": 128, "head_len": 512,
                                                "prompt_len": (1, 1)}),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostStep:
    """What one step took."""

    kind: str
    spent_ns: Counter[str]

    @property
    def total_us(self) -> float:
        return self.spent_ns.total() / 1e3


def run_host(cases: Sequence[HostCase], repeats: int) -> dict[str, Any]:
    """Measure every case; prints a table of each and gives the report."""
    report: dict[str, Any] = {
        "bench": "host",
        "clock": "thread CPU time",
        "repeats": repeats,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": BUDGET,
        "machine": describe_machine(),
        "cases": [],
    }
    for case in cases:
        _run(case.shrunk(16), in_parts=False)  # what is imported and made once
        whole, in_parts = [], []
        for _ in range(repeats):
            whole.append(_run(case, in_parts=False))
            in_parts.append(_run(case, in_parts=True))
        kinds = dict.fromkeys(step.kind for step in whole[0])
        found = {
            "case": case.name,
            "workload": asdict(case),
            "seconds": spread([sum(step.total_us for step in run) / 1e6 for run in whole]),
            "steps": {kind: _figures(_of(whole, kind), _of(in_parts, kind)) for kind in kinds},
        }
        report["cases"].append(found)
        print(_table(found), flush=True)
    return report


def _run(case: HostCase, *, in_parts: bool) -> list[HostStep]:
    """All requests at once, to their end: what each step took."""
    settings = SchedulerSettings(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        speculative_config=case.speculative_config,
    )
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        engine = FreeEngine(case.traffic, Path(home), settings)
        times, encode = PartTimes(), _encoder()
        if in_parts:
            watch(engine, times)
            encode = times.counted(encode, "encode")
        try:
            with kept_meanwhile():  # as in a server's process
                return _drive(engine, case.submits(), times, encode)
        finally:
            engine.loop.close()


def _drive(
    engine: FreeEngine, submits: Iterable[Submit], times: PartTimes, encode: Encode
) -> list[HostStep]:
    loop, num_left = engine.loop, 0
    times.take()
    for submit in submits:
        loop.handle(submit)
        num_left += 1
    steps = [HostStep("all requests submitted", times.take())]
    while num_left:
        engine.runner.plans.clear()
        times.take()
        outputs = loop.step()
        encode(outputs, loop.stats())
        steps.append(HostStep(_kind(engine.runner.plans), times.take()))
        num_left -= _num_ended(outputs)
    return steps


def _num_ended(outputs: StepOutputs) -> int:
    for output in outputs.outputs:
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"a request of the bench failed: {output.error}")
    return sum(output.finish_reason is not None for output in outputs.outputs)


def _kind(plans: Sequence[Plan]) -> str:
    """Of a step that launched this plan, or none."""
    if not plans or len(plans[0].rows) == 0:
        return "nothing computed"
    num_tokens, num_rows = plans[0].total_tokens, len(plans[0].rows)
    if plans[0].drafts:
        return f"guesses checked, {num_rows} rows"
    if num_tokens == num_rows:
        return f"decode, {'up to' if num_rows <= FEW_ROWS else 'more than'} {FEW_ROWS} rows"
    return "prompts, a graph" if num_tokens <= TOKENS[-1] else "prompts, kernel by kernel"


def watch(engine: FreeEngine, times: PartTimes) -> None:
    """Which method is which part."""
    runner, scheduler, loop = engine.model_runner, engine.scheduler, engine.loop
    admission, batch, state, sharing = (
        scheduler._admission, runner._batch, runner._state, runner._sharing,
    )  # fmt: skip
    times.watch(loop, ["handle"], "submit")
    times.watch(scheduler, ["schedule"], "plan")
    if scheduler._speculation is not None:
        times.watch(scheduler, ["_draft"], "drafts")
    times.watch(admission, ["choose_adapters", "prepare_adapters"], "adapters")
    times.watch(admission, ["admit"], "admit")
    times.watch(runner, ["execute"], "launch")
    times.watch(runner._drafts, ["settle"], "settle")
    times.watch(runner, ["_begin_drafts"], "checks")
    for part in (batch, runner._pending, state, sharing):
        times.watch(part, ["apply"], "arrivals")
    times.watch(engine.runner.tables, ["apply"], "page tables")
    times.watch(runner._mover, ["start"], "loads")
    times.watch(batch, ["inputs"], "inputs")
    times.watch(runner, ["_compute"], "arrays")
    times.watch(sharing, ["arrays"], "sharing")
    times.watch(state, ["arrays"], "sampling")
    times.watch(runner._repeated, ["find", "step"], "repeated")
    times.watch(runner._graphs, ["run"], "packet")
    times.watch(runner, ["_answer"], "after launch")
    times.watch(runner._pending, ["learn", "expect"], "tokens")
    begin = runner._begin
    # What waits for a launched step and reads its tokens.
    answered = {"_begin": lambda plan: times.counted(begin(plan), "results")}
    vars(runner).update(answered)
    times.watch(scheduler, ["advance"], "advance")
    times.watch(engine.cache, ["commit", "commit_step", "announce"], "publish")
    times.watch(loop, ["stats"], "stats")


def _encoder() -> Encode:
    """What the engine's process does with outputs; nothing where it could not run."""
    try:
        from manyroots.engine.wire import MessageKind, encode
    except ImportError:
        return lambda outputs, stats: None
    return lambda outputs, stats: encode(MessageKind.BATCH, Batch(outputs, stats))


def _of(runs: Sequence[Sequence[HostStep]], kind: str) -> list[list[HostStep]]:
    return [[step for step in run if step.kind == kind] for run in runs]


def _figures(
    whole: Sequence[Sequence[HostStep]], in_parts: Sequence[Sequence[HostStep]]
) -> dict[str, Any]:
    """Of one kind of steps: microseconds each, and by part."""
    totals = [[step.total_us for step in run] for run in whole]
    names = {name for run in in_parts for step in run for name in step.spent_ns}
    parts = {
        name: spread([sum(s.spent_ns[name] for s in run) / len(run) / 1e3 for run in in_parts], 1)
        for name in names
    }
    return {
        "num_steps": len(whole[0]),
        "mean_us": spread([sum(total) / len(total) for total in totals], 1),
        "p50_us": spread([percentile(total, 0.5) for total in totals], 1),
        "p99_us": spread([percentile(total, 0.99) for total in totals], 1),
        "parts_us": dict(sorted(parts.items(), key=lambda item: -item[1]["median"])),
    }


def _table(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    lines = [
        f"{found['case']}: {seconds['median']:.3f} s ({seconds['least']:.3f} to "
        f"{seconds['most']:.3f}) of processor time"
    ]
    for kind, figures in found["steps"].items():
        mean, p99 = figures["mean_us"], figures["p99_us"]
        lines.append(
            f"  {kind}, {figures['num_steps']} times: {mean['median']:.0f} us ({mean['least']:.0f} "
            f"to {mean['most']:.0f}), p99 {p99['median']:.0f}"
        )
        medians = {name: part["median"] for name, part in figures["parts_us"].items()}
        shown = [f"{name} {us:.0f}" for name, us in medians.items() if us >= LEAST_SHOWN_US]
        lines.append("    " + ", ".join(shown))
    return "\n".join(lines)
