"""The engine on the GPU beside the engine on the CPU: the same function, within rounding.

Takes a model of `models.py` and a dtype; compares
    graphs with single launches       the same tokens, bit by bit
    every token with the CPU          float32's distribution behind the same tokens gives it
    distributions with the CPU        of prompts in chunks and of decode steps, elementwise
    every kernel with its reference   in the engine's own steps, on the same inputs
with and without the prefix cache, and with adapters that come and go. In float32 the tolerance
table says how far apart they may be; in half precision, a little more than the CPU itself is off
in that precision. `faults.py` shows what these would find.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from manyroots.kernels.tolerances import TOLERANCES
from manyroots.messages import Submit
from tests.gpu import requests as made
from tests.gpu.checked import Record, all_checked
from tests.gpu.engines import Engines, Outputs, run, tokens_of
from tests.gpu.models import KINDS as KINDS
from tests.gpu.models import VOCAB, make_model
from tests.gpu.scores import (
    Slack,
    behind_prompts,
    check_choices,
    flat,
    output_scores,
    prompt_scores,
    roots,
)

BASE_ALONE = (None,)


@dataclass(frozen=True, slots=True)
class Batches:
    """What the GPU's engines compute, in this order."""

    base: list[Submit]
    adapted: list[Submit]
    again: list[Submit]
    """The same, found in the prefix cache where there is one."""
    heated: list[Submit]
    cut: list[Submit]
    odd: list[Submit]
    many: list[Submit]
    scored: list[Submit]
    """With the distributions that tokens are chosen from."""

    @classmethod
    def make(cls) -> Batches:
        return cls(
            base=made.few(BASE_ALONE),
            adapted=made.few(),
            again=made.few(),
            heated=made.few(temperature=0.9),
            cut=made.few(temperature=0.9, top_k=20),
            odd=made.odd(),
            many=made.many(),
            scored=made.few(logprobs=VOCAB),
        )

    def named(self) -> dict[str, list[Submit]]:
        return {name: getattr(self, name) for name in self.__slots__}


class Exact:
    """What the CPU says of sequences that the GPU gave, in float32 and in the GPU's dtype."""

    def __init__(self, engines: Engines) -> None:
        self._engines = replace(engines, device="cpu")

    def scores(self, batches: list[list[Submit]], dtype: str) -> list[dict[int, Tensor]]:
        engines = replace(self._engines, dtype=dtype)
        return [prompt_scores(outputs) for outputs in engines.outputs(batches)]


def slack_of(dtype: str, own: Tensor, exact: Tensor) -> Slack:
    """How far the GPU may be off: the table's row, or in half precision what the CPU's own
    distributions are off in that precision, times the table's factors."""
    if dtype == "float32":
        row = TOLERANCES["logits", torch.float32]
        return Slack(row.atol, row.atol, row.atol)
    worst, mean = TOLERANCES["worst", torch.bfloat16], TOLERANCES["rounding", torch.bfloat16]
    error = own - exact
    rows = roots(error)
    return Slack(
        worst.atol + (1 + worst.rtol) * float(error.abs().max()),
        worst.atol + (1 + worst.rtol) * float(rows.max()),
        mean.atol + (1 + mean.rtol) * float(rows.mean()),
    )


class Parity:
    """One model in one dtype, and what was found about it."""

    def __init__(self, folder: Path, kind: str, dtype: str, *, device: str = "cuda") -> None:
        self.name = f"{kind} {dtype}"
        self.dtype = dtype
        self.batches = Batches.make()
        self.engines = Engines(folder, dtype, device)
        self.notes: list[str] = []
        self._since = time.monotonic()
        make_model(folder, kind, is_decisive=dtype != "float32")
        self._lap("model")

    def _lap(self, what: str) -> None:
        now = time.monotonic()
        self.notes.append(f"{what} {now - self._since:.1f} s")
        self._since = now

    def compute(self, **more: object) -> dict[str, Outputs]:
        """The GPU's outputs by batch, with all adapters loaded before."""
        named = self.batches.named()
        loads = made.loads()
        outputs = self.engines.outputs([*loads, *named.values()], **more)
        return dict(zip(named, outputs[len(loads) :], strict=True))

    def check(self) -> str:
        """Raise AssertionError where the two differ; else say what was compared."""
        graphs = self.compute()
        self._lap("graphs")
        eager = self.compute(enforce_eager=True)
        for name in graphs:
            assert tokens_of(graphs[name]) == tokens_of(eager[name]), f"{name}: graph and eager"
        self._lap("eager")
        # Two slots for six adapters, and nothing kept: loads and evictions between the steps.
        moving = self.engines.outputs(
            [self.batches.adapted, self.batches.many], max_loras=2, enable_prefix_caching=False
        )
        self._lap("moving")
        worst, count = self.against_cpu(graphs, moving)
        self._lap("cpu")
        self.check_effect(graphs)
        kernels = self.check_kernels()
        self._lap("kernels")
        return (
            f"{self.name}: graph = eager; {count} tokens are the CPU's choices; distributions "
            f"within {worst:.1e}; {kernels}. {', '.join(self.notes)}"
        )

    def against_cpu(self, graphs: dict[str, Outputs], moving: list[Outputs]) -> tuple[float, int]:
        """Give the worst log-probability, and how many tokens were checked."""
        named = self.batches.named()
        # Each sequence once: what came from the cache is mostly what was computed before.
        pairs = [(name, named[name], tokens_of(graphs[name])) for name in named]
        pairs += [
            (f"{name}, loading", named[name], tokens_of(outputs))
            for name, outputs in zip(("adapted", "many"), moving, strict=True)
        ]
        rest = [made.continued(requests, tokens) for _, requests, tokens in pairs]
        exact = Exact(self.engines)
        scores = exact.scores(rest, "float32")
        scored = [name for name, _, _ in pairs].index("scored")
        own = scores if self.dtype == "float32" else exact.scores([rest[scored]], self.dtype)
        slack = slack_of(self.dtype, flat(own[0 if len(own) == 1 else scored]), flat(scores[scored]))
        # Prompts in chunks: the GPU scores the same sequences.
        [ours] = self.engines.outputs([rest[scored]])
        worst = slack.check("prompts", flat(prompt_scores(ours)), flat(scores[scored]))
        by_step = behind_prompts(named["scored"], scores[scored])
        worst = max(
            worst, slack.check("decodes", flat(output_scores(graphs["scored"])), flat(by_step))
        )
        count = sum(
            check_choices(
                name, requests, tokens, behind_prompts(requests, scores[index]), slack.each
            )
            for index, (name, requests, tokens) in enumerate(pairs)
        )
        self.notes.append(f"allowed {slack.each:.1e} {slack.row:.1e} {slack.mean:.1e}")
        return worst, count

    def check_kernels(self) -> str:
        """Every kernel of the engine's steps beside its reference."""
        record = Record(getattr(torch, self.dtype))
        with all_checked(record):
            loop = self.engines.loop(enforce_eager=True)
        try:
            for batch in made.loads():
                run(loop, batch)
            record.is_on = True
            for batch in (self.batches.adapted, self.batches.odd, self.batches.many):
                run(loop, batch)
        finally:
            loop.close()
        return record.check()

    def check_effect(self, graphs: dict[str, Outputs]) -> None:
        """Adapters that change nothing would hide that they are not there."""
        plain, adapted = tokens_of(graphs["base"]), tokens_of(graphs["adapted"])
        changed = sum(plain[number] != adapted[number] for number in plain)
        assert changed >= 6, f"adapters changed {changed} of {len(plain)} outputs"


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if the GPU differs from the CPU; else say what was compared."""
    return Parity(folder, kind, dtype).check()
