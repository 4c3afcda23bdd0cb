"""Guesses on a GPU: an engine with speculation beside the same engine without.

Takes a model of `models.py` and a dtype; drafts from earlier text and, where the kind may have a
prediction layer, from that layer. Rows of the base model and of adapters are in the same steps,
greedy and drawn. Compares
    tokens with those without guesses     float32: the same
    graphs with single launches           the same tokens, bit by bit
    tokens with the CPU's scores          bfloat16: each is the choice of float32's distribution
                                          after the same tokens, within rounding
Every engine must have drafted, and guesses must have been right and wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from manyroots.bench.recorded_drafts import RecordedDrafts
from manyroots.messages import SpeculationStats, Submit
from manyroots.runner.inputs import StepInputs
from manyroots.runner.runner import ModelRunner
from manyroots.step import Plan
from tests.gpu import requests as made
from tests.gpu.engines import Side, run, tokens_of
from tests.gpu.models import NAMES, VOCAB
from tests.gpu.parity import Parity
from tests.gpu.scores import behind_prompts, check_choices, flat
from tests.helpers.prediction_layers import add_prediction

PREDICTING = ("qwen3.5", "glm4-moe-lite")
"""Delta nets beside attention, and latents with experts."""
KINDS = ("llama", *PREDICTING)
_SUFFIX = (
    '{"method": "suffix", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}'
)
"""After a single equal token most guesses are wrong."""
RECORDED = "recorded"
"""Drafts from the answers without speculation, always of four tokens: steps repeat layouts."""
CONFIGS = {
    "suffix": _SUFFIX,
    RECORDED: _SUFFIX,
    "mtp": '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}',
}
ACCEPTANCE = 0.7
"""Of recorded guesses."""
LEAST_REPEATED = 4
QUIET = 0.05
"""With layers that add so little, a prediction layer is often right, and attention still counts."""
MAX_TOKENS = 36
_DRAWN = {"temperature": 0.9}
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {}, _DRAWN, {**_DRAWN, "top_k": 20})
_OWNERS = (None, NAMES[0], None, *NAMES[1:-1])


def drafted(count: int) -> list[Submit]:
    """Prompts of one token to several pages, by all adapters but that of the embedding."""
    rng = torch.Generator().manual_seed(21)
    batch = []
    for number in range(count):
        prompt = torch.randint(3, VOCAB, (1 + 12 * number,), generator=rng).tolist()
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        owner = _OWNERS[number % len(_OWNERS)]
        batch.append(made.request(number + 1, prompt, owner, max_tokens=MAX_TOKENS, **sampling))
    return batch


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine gave: each batch is computed twice."""

    tokens: list[dict[int, list[int]]]
    stats: SpeculationStats | None
    steps: Counter[str]
    """With guesses: `graph`, `repeated` (a graph laid out as an earlier step), `kernels`."""


class Guessing(Parity):
    """One model in one dtype, with guesses and without."""

    def run(
        self,
        batch: list[Submit],
        method: str | None,
        recorded: dict[int, list[int]] | None = None,
        **more: object,
    ) -> Run:
        """`method`: None without speculation. `recorded`: answers to draft from. The second time,
        each answer is among the recent output of its namespace, so guesses are right."""
        if method is not None:
            more["speculative_config"] = CONFIGS[method]
        with _counted() as steps:
            loop = self.engines.loop(enable_prefix_caching=False, **more)
            try:
                for loads in made.loads():
                    run(loop, loads)
                if recorded is not None:
                    loop._scheduler.speculation.source = _source(batch, recorded)
                tokens = [tokens_of(run(loop, batch)) for _ in range(2)]
                return Run(tokens, loop.stats().speculation, steps)
            finally:
                loop.close()

    def check_method(self, batch: list[Submit], plain: Run, method: str) -> str:
        """Raise AssertionError if guesses change a token; else say what was compared."""
        recorded = plain.tokens[0] if method == RECORDED else None
        ours = self.run(batch, method, recorded)
        stats = ours.stats
        assert stats is not None
        right, all_ = stats.total_accepted_tokens, stats.total_draft_tokens
        assert 0 < right < all_, f"{method}: {right} of {all_} guesses were right"
        if ours.steps["graph"]:
            eager = self.run(batch, method, recorded, enforce_eager=True)
            assert ours.tokens == eager.tokens, f"{method}: graph and eager"
        if method == RECORDED:
            repeated = ours.steps["repeated"]
            assert repeated >= LEAST_REPEATED, f"{repeated} steps repeat an earlier one's layout"
        said = f"{method}: {right} of {all_} guesses were right, {dict(ours.steps)} steps"
        pairs = [
            (mine[number], tokens)
            for mine, theirs in zip(ours.tokens, plain.tokens, strict=True)
            for number, tokens in theirs.items()
        ]
        same = sum(mine == theirs for mine, theirs in pairs)
        if self.dtype == "float32":
            assert same == len(pairs), f"{method}: {same} of {len(pairs)} answers as without"
            return f"{said}, all {same} answers as without"
        checked = sum(self._scored(method, batch, tokens) for tokens in ours.tokens)
        return f"{said}, {same} of {len(pairs)} answers as without, {checked} tokens are choices"

    def _scored(self, method: str, batch: list[Submit], tokens: dict[int, list[int]]) -> int:
        continued = made.continued(batch, tokens)
        [exact] = self._cpu_scores([continued], "float32")
        slack = self._slack(continued, flat(exact))
        return check_choices(method, batch, tokens, behind_prompts(batch, exact), slack.each)


def _source(batch: list[Submit], answers: dict[int, list[int]]) -> RecordedDrafts:
    source = RecordedDrafts(ACCEPTANCE, vocab_size=VOCAB)
    for request in batch:
        source.record(request.prompt, answers[int(request.request_id)])
    return source


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Steps that check guesses, by how they run."""
    steps: Counter[str] = Counter()
    any_, graph = ModelRunner._begin_any, ModelRunner._begin_graph

    def begin_any(runner: ModelRunner, plan: Plan, inputs: StepInputs, *rest: Any) -> Any:
        steps["kernels"] += bool(plan.drafts)
        return any_(runner, plan, inputs, *rest)

    def begin_graph(
        runner: ModelRunner, plan: Plan, inputs: StepInputs, graphs: Any, layout: Any = None
    ) -> Any:
        steps["graph"] += bool(plan.drafts)
        steps["repeated"] += layout is not None
        return graph(runner, plan, inputs, graphs, layout)

    with (
        mock.patch.object(ModelRunner, "_begin_any", begin_any),
        mock.patch.object(ModelRunner, "_begin_graph", begin_graph),
    ):
        yield steps


def check(folder: Path, kind: str, dtype: str, side: Side = Side.GPU, count: int = 10) -> str:
    """Raise AssertionError if something differs; else say what was compared. `count`: requests."""
    guessing, predicts = Guessing(folder, kind, dtype, side), kind in PREDICTING
    if predicts:
        add_prediction(folder / "base", is_right=True, quiet=QUIET)
    batch = drafted(count)
    plain = guessing.run(batch, None)
    assert plain.stats is None
    # Graphs return no hidden states.
    methods = ("suffix", "mtp") if predicts else ("suffix", RECORDED)
    return "; ".join(guessing.check_method(batch, plain, method) for method in methods)
