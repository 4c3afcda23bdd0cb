"""Drafts on real text: the same prompts with and without, by kind of text.

Takes engine settings; runs each workload on an engine without drafts and on one with, in turn, one
request at a time. Gives the ratio of their times, and how many guesses were right. Texts of the
workloads are here and go into the report. Where other processes had a part of the machine,
processor time counts.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manyroots.adapter_names import LoRARequest
from manyroots.bench.machine import describe_machine
from manyroots.bench.offline import counting
from manyroots.bench.processor import Taken, taken
from manyroots.bench.random_adapters import targets_of, write_adapters
from manyroots.bench.spread import spread
from manyroots.config import engine_settings
from manyroots.llm.llm import LLM
from manyroots.models.source import resolve_source
from manyroots.sampling import SamplingParams

_CODE = """\
def total_price(items, rate):
    total = 0
    for item in items:
        if item.count < 1:
            continue
        total = total + item.price * item.count
    tax = total * rate
    return total + tax


def print_invoice(items, rate):
    for item in items:
        print(item.name, item.count, item.price)
    print("total", total_price(items, rate))
"""
_LISTING = """\
$ ls -l src
-rw-r--r-- 1 build build  1840 Mar 11 09:14 config.py
-rw-r--r-- 1 build build  9213 Mar 11 09:14 engine.py
-rw-r--r-- 1 build build  4127 Mar 11 09:15 loader.py
-rw-r--r-- 1 build build 12877 Mar 11 09:15 server.py
$ pytest -q
FAILED tests/test_loader.py::test_empty_file - ValueError: no rows in the file
1 failed, 41 passed in 3.12s
"""
_RECORDS = """\
Ada Lovelace was born in London in 1815 and worked as a mathematician.
Alan Turing was born in London in 1912 and worked as a computer scientist.
Marie Curie was born in Warsaw in 1867 and worked as a physicist.
Emmy Noether was born in Erlangen in 1882 and worked as a mathematician.
Rosalind Franklin was born in London in 1920 and worked as a chemist.
"""
_FORM = (
    '{"name": "Ada Lovelace", "born_in": "London", "year": 1815, "work": "mathematician"}\n'
    '{"name": "Alan Turing", "born_in": "London", "year": 1912, "work": "computer scientist"}\n'
)


@dataclass(frozen=True, slots=True)
class TextWorkload:
    """Prompts of one kind."""

    name: str
    prompts: tuple[str, ...]
    temperature: float = 0.0


WORKLOADS = (
    TextWorkload(
        "editing",
        (
            f"The file before the change:\n\n{_CODE}\nThe file after `rate` was renamed to "
            f"`tax_rate`:\n\ndef total_price(items, tax_rate):\n",
            f"Original:\n\n{_CODE}\nThe same file with a comment above each function:\n\n"
            "# Adds up the prices.\ndef total_price(items, rate):\n",
        ),
    ),
    TextWorkload(
        "extraction",
        (
            f"Text:\n{_RECORDS}\nEach person as one line of JSON:\n{_FORM}",
            f"Text:\n{_RECORDS}\nThe sentences about mathematicians and physicists, word for "
            "word:\nAda Lovelace was born in London in 1815",
        ),
    ),
    TextWorkload(
        "agent",
        (
            f"Step 1\n{_LISTING}Step 2: nothing has changed, so the output is the same.\n"
            f"{_LISTING}Step 3: nothing has changed, so the output is the same.\n$ ls -l src\n",
            f"Observation 1:\n{_LISTING}\nObservation 2:\n{_LISTING}\nObservation 3:\n$ ls",
        ),
    ),
    TextWorkload(
        "prose",
        (
            "The old lighthouse stood at the end of the pier, and every evening",
            "When my grandmother was young, she decided to leave the village because",
        ),
        temperature=0.8,
    ),
)


@dataclass(frozen=True, slots=True)
class SpeculationRun:
    """What is run."""

    output_len: int
    repeats: int
    config: dict[str, Any]
    """As --speculative-config."""
    num_adapters: int = 0
    """Random ones, in turn over the prompts; 0: the base model."""
    adapter_rank: int = 16


def run_speculation(
    run: SpeculationRun, engine: dict[str, Any], workloads: tuple[TextWorkload, ...] = WORKLOADS
) -> dict[str, Any]:
    """Measure every workload; prints a table and gives the report."""
    report: dict[str, Any] = {
        "bench": "speculation",
        "workload": asdict(run),
        "texts": [asdict(one) for one in workloads],
        "machine": describe_machine(),
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="manyroots-bench-") as home:
        settings, adapters = _with_adapters(run, engine, Path(home))
        drafting = {**settings, "speculative_config": json.dumps(run.config)}
        with LLM(**settings) as plain, LLM(**drafting) as drafts:
            report["model"], report["dtype"] = plain.info.model_name, plain.info.dtype
            for workload in workloads:
                made = _Comparison(run, workload, plain, drafts, adapters).measure()
                report["runs"].append(made)
                _show(made)
    return report


def _with_adapters(
    run: SpeculationRun, engine: dict[str, Any], home: Path
) -> tuple[dict[str, Any], list[LoRARequest | None]]:
    if not run.num_adapters:
        return engine, [None]
    targets = targets_of(resolve_source(engine_settings(engine).model))
    paths = write_adapters(targets, home, run.num_adapters, run.adapter_rank)
    settings = {
        **engine,
        "enable_lora": True,
        "max_loras": run.num_adapters,
        "max_lora_rank": run.adapter_rank,
    }
    return settings, [
        LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)
    ]


class _Comparison:
    """One workload on both engines, alternately."""

    def __init__(
        self,
        run: SpeculationRun,
        workload: TextWorkload,
        plain: LLM,
        drafts: LLM,
        adapters: list[LoRARequest | None],
    ) -> None:
        self._run, self._workload = run, workload
        self._plain, self._drafts = plain, drafts
        self._adapters = adapters

    def measure(self) -> dict[str, Any]:
        for llm in (self._plain, self._drafts):
            self._answers(llm, "warm-up", length=4)
        pairs: list[tuple[Taken, Taken]] = []
        num_equal = num_tokens = 0
        before = self._drafts.stats().speculation
        for repeat in range(self._run.repeats):
            # Another salt: neither pages nor drafts of an earlier repeat are used again.
            with taken() as without:
                wanted = self._answers(self._plain, f"repeat {repeat}")
            with taken() as with_drafts:
                got = self._answers(self._drafts, f"repeat {repeat}")
            pairs.append((without, with_drafts))
            num_equal += sum(a == b for a, b in zip(wanted, got, strict=True))
            num_tokens = sum(map(len, wanted))
        after = self._drafts.stats().speculation
        assert before is not None
        assert after is not None
        drafted = after.total_draft_tokens - before.total_draft_tokens
        accepted = after.total_accepted_tokens - before.total_accepted_tokens
        return {
            "workload": self._workload.name,
            "output_tokens": num_tokens,
            "answers_with_equal_tokens": num_equal,
            "answers": self._run.repeats * len(self._workload.prompts),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "seconds": {
                "plain": _seconds([plain for plain, _ in pairs]),
                "drafts": _seconds([drafts for _, drafts in pairs]),
            },
            "speedup": {
                "wall": spread([plain.wall_s / drafts.wall_s for plain, drafts in pairs], 3),
                "processor": spread(
                    [plain.processor_s / drafts.processor_s for plain, drafts in pairs], 3
                ),
            },
            "counts": counting(taken.others for pair in pairs for taken in pair),
        }

    def _answers(self, llm: LLM, salt: str, length: int | None = None) -> list[list[int]]:
        """One request after the other."""
        sampling = SamplingParams(
            temperature=self._workload.temperature,
            seed=7,
            max_tokens=length or self._run.output_len,
            ignore_eos=True,
        )
        answers = []
        for number, prompt in enumerate(self._workload.prompts):
            adapter = self._adapters[number % len(self._adapters)]
            salted = f"{salt}, {self._workload.name}, {number}"
            [made] = llm.generate([prompt], sampling, lora_request=adapter, cache_salt=salted)
            answers.append(list(made.outputs[0].token_ids))
        return answers


def _seconds(times: list[Taken]) -> dict[str, Any]:
    return {
        "wall": spread([time.wall_s for time in times], 3),
        "processor": spread([time.processor_s for time in times], 3),
    }


def _show(made: dict[str, Any]) -> None:
    speedup, counts = made["speedup"], made["counts"]
    share = made["accepted_tokens"] / max(made["drafted_tokens"], 1)
    print(
        f"{made['workload']:>10}  {speedup[counts]['median']:5.2f} times "
        f"({speedup[counts]['least']:.2f} to {speedup[counts]['most']:.2f}, {counts} time)   "
        f"{made['accepted_tokens']} of {made['drafted_tokens']} guesses right ({share:.0%})   "
        f"{made['answers_with_equal_tokens']} of {made['answers']} answers equal",
        flush=True,
    )
