"""Offline throughput: prompts that share a prefix, submitted together, greedy.

Every repeat starts with a cold cache (its own salt), so what is reused is what the batch itself
shares. Output tokens per second count the whole run, prefill included.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from manyroots.bench.machine import describe_machine
from manyroots.bench.peers import TransformersPeer
from manyroots.config import engine_settings
from manyroots.llm import LLM
from manyroots.sampling import SamplingParams

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
    "there",
    "would",
    "their",
    "we",
    "him",
    "been",
    "has",
    "when",
    "who",
    "will",
    "no",
    "more",
    "if",
    "out",
    "so",
    "up",
    "said",
    "what",
    "its",
    "about",
    "than",
    "into",
    "them",
    "can",
    "only",
    "other",
    "time",
    "new",
    "some",
    "could",
    "these",
    "two",
    "may",
    "first",
    "then",
    "do",
    "any",
    "like",
    "my",
    "now",
    "over",
    "such",
    "our",
    "man",
    "me",
    "even",
    "most",
    "made",
    "after",
    "also",
    "river",
    "stone",
    "garden",
    "winter",
    "letter",
    "engine",
    "market",
    "window",
    "silver",
    "bridge",
    "forest",
    "music",
    "number",
]


@dataclass(frozen=True, slots=True)
class OfflineWorkload:
    """What is run."""

    num_prompts: int
    prompt_len: int
    shared_len: int
    output_len: int
    repeats: int

    def prompts(self, llm: LLM) -> list[list[int]]:
        """Prompts of words: a common beginning, then 3/4 to 5/4 of the mean tail."""
        rng = random.Random(0)

        def tokens(count: int) -> list[int]:
            text = " ".join(rng.choice(WORDS) for _ in range(count))
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
    for dtype in dtypes:
        run = _run_dtype(workload, engine, dtype, compare)
        report["runs"].append(run)
        _show(run)
    return report


def _run_dtype(
    workload: OfflineWorkload, engine: dict[str, Any], dtype: str, compare: bool
) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=True)
    num_tokens = workload.num_prompts * workload.output_len
    with LLM(**engine, dtype=dtype) as llm:
        prompts = workload.prompts(llm)
        run: dict[str, Any] = {
            "dtype": dtype,
            "model": llm.info.model_name,
            "device": llm.info.device,
            "prompts": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": num_tokens,
        }
        model = engine_settings(engine).model
        peer = TransformersPeer(model, dtype, llm.info.device) if compare else None
        _say(f"{dtype}: warming up")
        short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate(prompts, short, cache_salt="warm-up")
        if peer is not None:
            peer.run(prompts[:2], 2)
        ours: list[float] = []
        theirs: list[float] = []
        # Turn and turn about, so that a change of the machine's speed hits both alike.
        for repeat in range(workload.repeats):
            hits = llm.stats().total_hit_tokens
            began = time.perf_counter()
            results = llm.generate(prompts, sampling, cache_salt=f"repeat {repeat}")
            ours.append(time.perf_counter() - began)
            run["reused_prompt_tokens"] = llm.stats().total_hit_tokens - hits
            if peer is not None:
                seconds, tokens = peer.run(prompts, workload.output_len)
                theirs.append(seconds)
                own = [result.outputs[0].token_ids for result in results]
                run["prompts_with_equal_tokens"] = sum(
                    a == b for a, b in zip(own, tokens, strict=True)
                )
            _say(f"{dtype}: repeat {repeat + 1} of {workload.repeats} done")
    run["manyroots"] = _figures(ours, num_tokens)
    if peer is not None:
        run["peer"] = {"name": peer.name, **_figures(theirs, num_tokens)}
        run["ratio"] = statistics.median(theirs) / statistics.median(ours)
    return run


def _figures(seconds: list[float], num_tokens: int) -> dict[str, Any]:
    return {
        "seconds": [round(s, 3) for s in seconds],
        "output_tokens_per_s": round(num_tokens / statistics.median(seconds), 1),
    }


def _show(run: dict[str, Any]) -> None:
    line = f"{run['dtype']:>9}  manyroots {run['manyroots']['output_tokens_per_s']:8.1f} tok/s"
    if "peer" in run:
        line += (
            f"   {run['peer']['name']} {run['peer']['output_tokens_per_s']:8.1f} tok/s"
            f"   ratio {run['ratio']:.2f}"
            f"   same tokens on {run['prompts_with_equal_tokens']} of {run['prompts']} prompts"
        )
    print(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
