"""Offline throughput: prompts that share a prefix, submitted together, greedy.

Every repeat starts with a cold cache (its own salt), so what is reused is what the batch itself
shares. Output tokens per second count the whole run, prefill included. With adapters, the same
prompts are run with random adapters in turn over the batch, beside the base model's run; each
adapter computes the shared prefix for itself.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyroots.adapter_names import LoRARequest
from manyroots.bench.machine import describe_machine
from manyroots.bench.peers import TransformersPeer
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.config import engine_settings
from manyroots.llm import LLM
from manyroots.models.source import resolve_source
from manyroots.sampling import SamplingParams

TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also river
stone garden winter letter engine market window silver bridge forest music number
"""


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


class _Run:
    """One dtype: our engine and the peer, turn and turn about."""

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
            peer = self._peer(llm.info.device)
            _say(f"{run['dtype']}: warming up")
            for case in cases.values():
                case.warm_up(llm, prompts, peer)
            # Turn and turn about, so that a change of the machine's speed hits all alike.
            for repeat in range(workload.repeats):
                for case in cases.values():
                    case.run(llm, prompts, peer, workload.output_len, repeat)
                _say(f"{run['dtype']}: repeat {repeat + 1} of {workload.repeats} done")
        run.update(cases["base"].figures())
        if "adapters" in cases:
            run["adapters"] = cases["adapters"].figures()
            run["adapters"]["share_of_base"] = round(
                run["adapters"]["manyroots"]["output_tokens_per_s"]
                / run["manyroots"]["output_tokens_per_s"],
                3,
            )
        return run

    def _peer(self, device: str) -> TransformersPeer | None:
        if not self._compare:
            return None
        model = engine_settings(self._settings).model
        return TransformersPeer(model, self._settings["dtype"], device, self._adapters)


class _Case:
    """The prompts with or without adapters, and what each repeat took."""

    def __init__(self, names: list[str] | None, run: dict[str, Any]) -> None:
        self._names = names
        self._num_tokens = run["output_tokens"]
        self._ours: list[float] = []
        self._theirs: list[float] = []
        self._facts: dict[str, Any] = {}

    def warm_up(self, llm: LLM, prompts: list[list[int]], peer: TransformersPeer | None) -> None:
        self._generate(llm, prompts, 4, "warm-up")
        if peer is not None:
            peer.run(prompts[:2], 2, None if self._names is None else self._names[:2])

    def run(
        self,
        llm: LLM,
        prompts: list[list[int]],
        peer: TransformersPeer | None,
        output_len: int,
        repeat: int,
    ) -> None:
        hits = llm.stats().total_hit_tokens
        began = time.perf_counter()
        own = self._generate(llm, prompts, output_len, f"repeat {repeat}")
        self._ours.append(time.perf_counter() - began)
        self._facts["reused_prompt_tokens"] = llm.stats().total_hit_tokens - hits
        if peer is not None:
            seconds, tokens = peer.run(prompts, output_len, self._names)
            self._theirs.append(seconds)
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
        figures = {**facts, "manyroots": _figures(self._ours, self._num_tokens)}
        if self._theirs:
            figures["peer"] = {"name": name, **_figures(self._theirs, self._num_tokens)}
            figures["ratio"] = statistics.median(self._theirs) / statistics.median(self._ours)
        return figures


def _figures(seconds: list[float], num_tokens: int) -> dict[str, Any]:
    return {
        "seconds": [round(s, 3) for s in seconds],
        "output_tokens_per_s": round(num_tokens / statistics.median(seconds), 1),
    }


def _show(run: dict[str, Any]) -> None:
    print(_line(run["dtype"], run, run["prompts"]))
    if "adapters" in run:
        line = _line("adapters", run["adapters"], run["prompts"])
        print(f"{line}   {run['adapters']['share_of_base']:.2f} of base")


def _line(label: str, figures: dict[str, Any], num_prompts: int) -> str:
    line = f"{label:>9}  manyroots {figures['manyroots']['output_tokens_per_s']:8.1f} tok/s"
    if "peer" in figures:
        line += (
            f"   {figures['peer']['name']} {figures['peer']['output_tokens_per_s']:8.1f} tok/s"
            f"   ratio {figures['ratio']:.2f}"
            f"   same tokens on {figures['prompts_with_equal_tokens']} of {num_prompts} prompts"
        )
    return line


def _say(text: str) -> None:
    print(text, file=sys.stderr)
