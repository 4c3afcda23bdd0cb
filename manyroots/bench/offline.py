"""Offline throughput: prompts that share a prefix, submitted together, greedy.

Every repeat starts with a cold cache (its own salt), so what is reused is what the batch itself
shares. Output tokens per second count the whole run, prefill included, on the wall and by processor
time; where other processes had a part of the machine, processor time counts. With adapters, the
same prompts are run with random adapters in turn over the batch, beside the base model's run; each
adapter computes the shared prefix for itself, so more tokens are computed: what that alone leaves
of base is given, too.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyroots.adapter_names import LoRARequest
from manyroots.bench.machine import describe_machine
from manyroots.bench.peer_process import PeerProcess
from manyroots.bench.processor import BUSY, Taken, taken
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.spread import spread
from manyroots.bench.words import TEXT
from manyroots.config import engine_settings
from manyroots.llm.llm import LLM
from manyroots.models.source import resolve_source
from manyroots.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineWorkload:
    """What is run."""

    num_prompts: int
    prompt_len: int
    shared_len: int
    output_len: int
    repeats: int
    num_adapters: int
    """0: the base model alone."""
    adapter_rank: int

    def prompts(self, llm: LLM) -> list[list[int]]:
        """Prompts of words: a common beginning, then 3/4 to 5/4 of the mean tail."""
        rng = random.Random(0)
        words = TEXT.split()

        def tokens(count: int) -> list[int]:
            text = " ".join(rng.choice(words) for _ in range(count))
            return llm.tokenizer.encode(text, add_special_tokens=False)[:count]

        shared = tokens(self.shared_len)
        tail = self.prompt_len - self.shared_len
        lengths = [max(1, tail * rng.randint(75, 125) // 100) for _ in range(self.num_prompts)]
        return [shared + tokens(length) for length in lengths]


def run_offline(
    workload: OfflineWorkload, engine: dict[str, Any], dtypes: list[str], *, compare: bool
) -> dict[str, Any]:
    """Measure every dtype; prints a table and gives the report."""
    report: dict[str, Any] = {
        "bench": "offline",
        "workload": {**asdict(workload), "sampling": "greedy, end of text ignored"},
        "machine": describe_machine(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        settings, adapters = _with_adapters(workload, engine, Path(home))
        for dtype in dtypes:
            run = _Run(workload, settings, dtype, adapters, compare=compare).measure()
            report["runs"].append(run)
            _show(run)
    return report


def _with_adapters(
    workload: OfflineWorkload, engine: dict[str, Any], home: Path
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Settings that know the workload's adapters, and where each one's files are."""
    if workload.num_adapters == 0:
        return engine, {}
    targets = targets_of(resolve_source(engine_settings(engine).model))
    paths = write_adapters(targets, home, workload.num_adapters, workload.adapter_rank)
    adapters = {path.name: path for path in paths}
    settings = {
        **engine,
        "enable_lora": True,
        "lora_modules": tuple(f"{name}={path}" for name, path in adapters.items()),
        "max_loras": workload.num_adapters,
        "max_lora_rank": workload.adapter_rank,
    }
    return settings, adapters


CLOCKS = ("wall", "processor")


def counting(others: Iterable[float | None]) -> str:
    """Which clock's figures count: wall time if no other process used the machine."""
    return "processor" if any(share is not None and share > BUSY for share in others) else "wall"


def _num_computed(run: dict[str, Any], figures: dict[str, Any]) -> int:
    """Tokens that went through the model."""
    computed: int = run["prompt_tokens"] - figures["reused_prompt_tokens"] + run["output_tokens"]
    return computed


class _Run:
    """One dtype: our engine and the peer, alternately."""

    def __init__(
        self,
        workload: OfflineWorkload,
        settings: dict[str, Any],
        dtype: str,
        adapters: dict[str, Path],
        *,
        compare: bool,
    ) -> None:
        self._workload = workload
        self._settings = {**settings, "dtype": dtype}
        self._adapters = adapters
        self._compare = compare

    def measure(self) -> dict[str, Any]:
        workload = self._workload
        with LLM(**self._settings) as llm:
            prompts = workload.prompts(llm)
            run: dict[str, Any] = {
                "dtype": self._settings["dtype"],
                "model": llm.info.model_name,
                "device": llm.info.device,
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                "output_tokens": workload.num_prompts * workload.output_len,
            }
            cases = {"base": _Case(None, run)}
            if self._adapters:
                turns = itertools.cycle(self._adapters)
                names = [next(turns) for _ in prompts]
                cases["adapters"] = _Case(names, run)
            with self._peer(llm.info.device) as peer:
                self._measure(llm, prompts, cases, peer)
        run.update(cases["base"].figures())
        run["counts"] = counting(case.others for case in cases.values())
        if "adapters" in cases:
            run["adapters"] = cases["adapters"].figures()
            run["adapters"]["share_of_base"] = {
                clock: round(
                    run["adapters"]["manyroots"]["tokens_per_s"][clock]
                    / run["manyroots"]["tokens_per_s"][clock],
                    3,
                )
                for clock in CLOCKS
            }
            run["adapters"]["share_by_token_counts"] = round(
                _num_computed(run, run) / _num_computed(run, run["adapters"]), 3
            )
        return run

    def _measure(
        self,
        llm: LLM,
        prompts: list[list[int]],
        cases: dict[str, _Case],
        peer: PeerProcess | None,
    ) -> None:
        """Alternately, so that a change of the machine's speed hits all alike."""
        dtype, workload = self._settings["dtype"], self._workload
        _say(f"{dtype}: warming up")
        for case in cases.values():
            case.warm_up(llm, prompts, peer)
        for repeat in range(workload.repeats):
            for case in cases.values():
                case.run(llm, prompts, peer, workload.output_len, repeat)
            _say(f"{dtype}: repeat {repeat + 1} of {workload.repeats} done")

    def _peer(self, device: str) -> AbstractContextManager[PeerProcess | None]:
        if not self._compare:
            return nullcontext()
        model = engine_settings(self._settings).model
        return closing(PeerProcess(model, self._settings["dtype"], device, self._adapters))


class _Case:
    """The prompts with or without adapters, and what each repeat took."""

    def __init__(self, names: list[str] | None, run: dict[str, Any]) -> None:
        self._names = names
        self._num_tokens = run["output_tokens"]
        self._ours: list[Taken] = []
        self._theirs: list[Taken] = []
        self._facts: dict[str, Any] = {}

    @property
    def others(self) -> float | None:
        """The largest share of the machine that others had in any repeat."""
        known = [time.others for time in self._ours + self._theirs if time.others is not None]
        return max(known, default=None)

    def warm_up(self, llm: LLM, prompts: list[list[int]], peer: PeerProcess | None) -> None:
        self._generate(llm, prompts, 4, "warm-up")
        if peer is not None:
            peer.run(prompts[:2], 2, None if self._names is None else self._names[:2])

    def run(
        self,
        llm: LLM,
        prompts: list[list[int]],
        peer: PeerProcess | None,
        output_len: int,
        repeat: int,
    ) -> None:
        hits = llm.stats().total_hit_tokens
        with taken() as time:
            own = self._generate(llm, prompts, output_len, f"repeat {repeat}")
        self._ours.append(time)
        self._facts["reused_prompt_tokens"] = llm.stats().total_hit_tokens - hits
        if peer is not None:
            time, tokens = peer.run(prompts, output_len, self._names)
            self._theirs.append(time)
            self._facts["peer_name"] = peer.name
            self._facts["prompts_with_equal_tokens"] = sum(
                a == b for a, b in zip(own, tokens, strict=True)
            )

    def _generate(
        self, llm: LLM, prompts: list[list[int]], output_len: int, salt: str
    ) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        results = llm.generate(
            prompts,
            sampling,
            lora_request=None
            if self._names is None
            else [LoRARequest(name) for name in self._names],
            cache_salt=salt,
        )
        return [result.outputs[0].token_ids for result in results]

    def figures(self) -> dict[str, Any]:
        facts = dict(self._facts)
        name = facts.pop("peer_name", None)
        figures = {
            **facts,
            "others": self.others,
            "manyroots": _figures(self._ours, self._num_tokens),
        }
        if self._theirs:
            figures["peer"] = {"name": name, **_figures(self._theirs, self._num_tokens)}
            # Of the two that ran one after the other, so that a slow minute hits both.
            both = list(zip(self._ours, self._theirs, strict=True))
            figures["ratio"] = {
                "wall": spread([theirs.wall_s / ours.wall_s for ours, theirs in both], 3),
                "processor": spread(
                    [theirs.processor_s / ours.processor_s for ours, theirs in both], 3
                ),
            }
        return figures


def _figures(times: list[Taken], num_tokens: int) -> dict[str, Any]:
    seconds = {
        "wall": spread([time.wall_s for time in times], 3),
        "processor": spread([time.processor_s for time in times], 3),
    }
    rates = {clock: round(num_tokens / seconds[clock]["median"], 1) for clock in CLOCKS}
    return {"seconds": seconds, "tokens_per_s": rates}


def _show(run: dict[str, Any]) -> None:
    cases = {run["dtype"]: run}
    if "adapters" in run:
        cases["adapters"] = run["adapters"]
    for label, figures in cases.items():
        for clock in CLOCKS:
            print(_line(label, clock, figures, counts=run["counts"] == clock))
    if "prompts_with_equal_tokens" in run:
        same = ", ".join(
            f"{label} {figures['prompts_with_equal_tokens']}" for label, figures in cases.items()
        )
        print(f"of {run['prompts']} prompts the same tokens as the peer: {same}")
    if "adapters" in run:
        allowed = run["adapters"]["share_by_token_counts"]
        print(
            f"adapters: {_num_computed(run, run['adapters'])} tokens computed, base "
            f"{_num_computed(run, run)}; the counts alone allow {allowed:.2f} of base"
        )
    shares = [figures["others"] for figures in cases.values() if figures["others"] is not None]
    if shares:
        print(
            f"others had up to {max(shares):.0%} of the machine: "
            f"{_CLOCK_NAMES[run['counts']]} counts"
        )


_CLOCK_NAMES = {"wall": "the clock on the wall", "processor": "processor time"}


def _line(label: str, clock: str, figures: dict[str, Any], *, counts: bool) -> str:
    own = figures["manyroots"]
    line = (
        f"{'*' if counts else ' '} {label:>8} {clock:>9}  "
        f"manyroots {own['tokens_per_s'][clock]:8.1f} tok/s ({_range(own['seconds'][clock])} s)"
    )
    if "peer" in figures:
        peer, ratio = figures["peer"], figures["ratio"][clock]
        line += (
            f"   {peer['name']} {peer['tokens_per_s'][clock]:8.1f} tok/s "
            f"({_range(peer['seconds'][clock])} s)"
            f"   ratio {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
        )
    if "share_of_base" in figures:
        line += f"   {figures['share_of_base'][clock]:.2f} of base"
    return line


def _range(seconds: dict[str, Any]) -> str:
    return f"{seconds['least']:.1f} to {seconds['most']:.1f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)
