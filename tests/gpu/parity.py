"""The engine on the GPU beside the engine on the CPU: the same function, within rounding.

Takes a model of `models.py` and a dtype; compares
    graphs with single launches       the same tokens, bit by bit
    every token with the CPU          float32's distribution after the same tokens gives it
    distributions with the CPU        of prompts in chunks and of decode steps, elementwise
    every kernel with its reference   in the engine's own steps, on the same inputs
with and without the prefix cache, and with adapters that come and go. In float32 the tolerance
table says how far apart they may be; in half precision, a little more than the CPU itself is off
in that precision; with weights in FP8, than the CPU is off where it rounds rows as the GPU does.
`faults.py` shows what these find.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from manyroots.engine.loop import EngineLoop
from manyroots.kernels.tolerances import TOLERANCES
from manyroots.messages import Submit
from tests.gpu import requests as made
from tests.gpu.checked import Record, all_checked
from tests.gpu.engines import MAX_NUM_SEQS, Engines, Outputs, Side, run, tokens_of
from tests.gpu.models import VOCAB, is_fp8, make_model
from tests.gpu.scores import (
    Slack,
    behind_prompts,
    check_choices,
    flat,
    output_scores,
    prompt_scores,
    roots,
)

Batches = dict[str, list[Submit]]
Computed = list[tuple[str, list[Submit], Outputs]]
"""Batches by name, with what the GPU gave for them."""


def all_batches(dtype: str) -> Batches:
    """What the GPU's engines compute, in this order."""
    batches = {
        "base": made.few((None,)),
        "adapted": made.few(),
        "again, from the cache": made.few(),
        "heated": made.few(temperature=0.9),
        "cut": made.few(temperature=0.9, top_k=20),
        "odd": made.odd(),
        "many": made.many(),
        "grown": made.grown(),
        # With the distributions that tokens are chosen from.
        "scored": made.few(logprobs=VOCAB),
    }
    if MAX_NUM_SEQS[dtype] < len(batches["many"]):
        del batches["many"]
    return batches


class Parity:
    """One model in one dtype, beside the CPU."""

    def __init__(self, folder: Path, kind: str, dtype: str, side: Side = Side.GPU) -> None:
        self.dtype = dtype
        self._is_fp8 = is_fp8(kind)
        self.engines = Engines(folder, dtype, side)
        self.laps: list[str] = []
        self._since = time.monotonic()
        make_model(folder, kind, is_decisive=dtype != "float32")

    def check(self) -> str:
        """Raise AssertionError where the two differ; else say what was compared."""
        batches = all_batches(self.dtype)
        with _compiling_beside(self.engines):
            graphs = self.compute(batches)
        self._lap("graphs")
        eager = self.compute(batches, enforce_eager=True)
        for (name, _, ours), (_, _, theirs) in zip(graphs, eager, strict=True):
            assert tokens_of(ours) == tokens_of(theirs), f"{name}: graph and eager"
        check_effect(graphs)
        self._lap("eager")
        # Two slots for six adapters, and no page is kept: loads and evictions between the steps.
        some = {name: batches[name] for name in ("adapted", "many") if name in batches}
        moving = self.compute(some, max_loras=2, enable_prefix_caching=False, loads_first=False)
        self._lap("moving")
        found = self.against_cpu(graphs + moving)
        self._lap("CPU")
        kernels = self.check_kernels(batches)
        self._lap("kernels")
        return f"graph = eager; {found}; {kernels}; {', '.join(self.laps)}"

    def _lap(self, what: str) -> None:
        now = time.monotonic()
        self.laps.append(f"{what} {now - self._since:.0f} s")
        self._since = now

    def compute(self, batches: Batches, *, loads_first: bool = True, **more: object) -> Computed:
        """The GPU's outputs. `loads_first`: whether all adapters are there when they begin."""
        loop = self.engines.loop(**more)
        try:
            for batch in made.loads() if loads_first else []:
                run(loop, batch)
            computed: Computed = []
            for name, batch in batches.items():
                computed.append((name, batch, run(loop, batch)))
                if name == "grown":
                    # At once: a window has 58 pages for 80 rows, and another batch would evict
                    # the ends of these answers.
                    computed.append(_resume(loop, *computed[-1][1:]))
            return computed
        finally:
            loop.close()

    def against_cpu(self, computed: Computed) -> str:
        """Hold what the GPU gave against the CPU's scores of it. One batch is called `scored`."""
        rest = [made.continued(requests, tokens_of(news)) for _, requests, news in computed]
        exact = self._cpu_scores(rest, "float32")
        at = [name for name, _, _ in computed].index("scored")
        slack = self._slack(rest[at], flat(exact[at]))
        found, count = [], 0
        for (name, requests, news), scores in zip(computed, exact, strict=True):
            behind = behind_prompts(requests, scores)
            count += check_choices(name, requests, tokens_of(news), behind, slack.each)
            if requests[0].sampling.logprobs is not None:
                found.append(slack.check(name, flat(output_scores(news)), flat(behind)))
        # The same sequences as prompts, which are computed in chunks.
        [prompts] = self.engines.outputs([rest[at]])
        found.append(slack.check("prompts", flat(prompt_scores(prompts)), flat(exact[at])))
        return f"{count} tokens are the CPU's choices, distributions agree: {', '.join(found)}"

    def _cpu_scores(
        self, batches: list[list[Submit]], dtype: str, side: Side = Side.CPU
    ) -> list[dict[int, Tensor]]:
        engines = replace(self.engines, side=side, dtype=dtype)
        return [prompt_scores(outputs) for outputs in engines.outputs(batches)]

    def _slack(self, requests: list[Submit], exact: Tensor) -> Slack:
        """How far the GPU may be off: the table's row, or in half precision what the CPU's own
        distributions are off in that precision, times the table's factors. With weights in FP8 a
        GPU rounds many rows to FP8, too, which the CPU does with the references in its place."""
        if self.dtype == "float32" and not self._is_fp8:
            row = TOLERANCES["logits", torch.float32]
            return Slack(row.atol, row.atol, row.atol)
        side = Side.REFERENCES if self._is_fp8 else Side.CPU
        [own] = self._cpu_scores([requests], self.dtype, side)
        error = flat(own) - exact
        worst, mean = TOLERANCES["worst", torch.bfloat16], TOLERANCES["rounding", torch.bfloat16]
        return Slack(
            each=worst.atol + (1 + worst.rtol) * float(error.abs().max()),
            row=worst.atol + (1 + worst.rtol) * float(roots(error).max()),
            mean=mean.atol + (1 + mean.rtol) * float(roots(error).mean()),
        )

    def check_kernels(self, batches: Batches) -> str:
        """Every kernel of the engine's steps beside its reference."""
        with self.recorded() as (record, loop):
            for name in ("adapted", "odd", "many"):
                run(loop, batches.get(name, []))
        return record.check()

    @contextmanager
    def recorded(self, **more: object) -> Iterator[tuple[Record, EngineLoop]]:
        """An engine that has loaded all adapters and compares every kernel from now on."""
        record = Record(getattr(torch, self.dtype))
        with all_checked(record):
            loop = self.engines.loop(enforce_eager=True, **more)
        try:
            for batch in made.loads():
                run(loop, batch)
            record.is_on = True
            yield record, loop
        finally:
            loop.close()


def _resume(
    loop: EngineLoop, grown: list[Submit], answers: Outputs
) -> tuple[str, list[Submit], Outputs]:
    """Continue after what was generated, over the pages that decode steps filled."""
    resumed = made.resumed(grown, tokens_of(answers))
    outputs: Outputs = {}
    for request in resumed:  # alone: few tokens are computed, not as many as all have together
        outputs |= run(loop, [request])
    for request in grown:
        number = int(request.request_id)
        cached = outputs[number][0].num_cached_tokens
        assert cached > len(request.prompt), f"{cached} tokens of {number} were found"
    return "resumed", resumed, outputs


@contextmanager
def _compiling_beside(engines: Engines) -> Iterator[None]:
    """Have a second process compile what prompts need, while this one begins with decode steps.
    In float32 that is half of a minute."""
    if engines.dtype != "float32" or engines.side is not Side.GPU:
        yield
        return
    command = [sys.executable, "-m", "tests.gpu.parity", str(engines.folder), engines.dtype]
    with subprocess.Popen(command):
        yield


def check_effect(computed: Computed) -> None:
    """Adapters that change nothing would hide that they are not there."""
    found = {name: tokens_of(news) for name, _, news in computed}
    plain, adapted = found["base"], found["adapted"]
    changed = sum(plain[number] != adapted[number] for number in plain)
    assert changed >= 6, f"adapters changed {changed} of {len(plain)} outputs"


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if the GPU differs from the CPU; else say what was compared."""
    return Parity(folder, kind, dtype).check()


if __name__ == "__main__":
    # An engine without graphs compiles a prompt's kernels when it is built.
    Engines(Path(sys.argv[1]), sys.argv[2], Side.GPU).loop(enforce_eager=True).close()
