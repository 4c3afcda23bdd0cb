"""Sampling in graphs: each parameter, alone and beside all others.

Takes a model of `models.py` and a dtype; compares
    graphs with single launches     tokens, ranks and logprobs, bit by bit; every step that only
                                    decodes is a graph, whatever its rows ask for
    the sampler with its reference  in the engine's own steps, on the same logits
    tokens with the CPU's           in float32, where logits are the same but for rounding: the same
                                    seeds give the same tokens, but where a draw falls between
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from manyroots.messages import Submit
from manyroots.runner.inputs import StepInputs
from manyroots.runner.runner import ModelRunner
from manyroots.step import Plan, TokenLogprobs
from tests.gpu import requests as made
from tests.gpu.checked import Record, all_checked
from tests.gpu.engines import Engines, Outputs, Side, run, tokens_of
from tests.gpu.models import VOCAB, make_model

KINDS = ("llama",)
STOPS = tuple(range(3, VOCAB, 3))[:100]
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.5, "top_p": 0.9},
    "both": {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "penalties, drawn": {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 0.7},
    "biases": {"temperature": 1.0, "logit_bias": {t: (-1) ** t * 3.0 for t in range(0, VOCAB, 2)}},
    "minimum": {"temperature": 1.0, "min_tokens": 6},
    "logprobs": {"logprobs": 5},
    "all": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 4, "logprobs": 20,
    },
}  # fmt: skip
"""Some with stop ids that `min_tokens` forbids at first."""
SAME_AS_CPU = 0.95
"""Of all requests in float32: once in very many tokens a rounding moves a draw over a boundary."""


def batches(count: int) -> dict[str, list[Submit]]:
    """A few requests that ask for the same, for each thing to ask for; then all at once."""
    alone = {
        name: [_stopping(r) for r in made.few((None,), count=count, max_tokens=12, **asked)]
        for name, asked in ASKED.items()
    }
    mixed = []
    for number, asked in enumerate([*ASKED.values()] * 2, start=1):
        prompt = [5, 7 + number % 5, 11]
        mixed.append(_stopping(made.request(number, prompt, None, max_tokens=16, **asked)))
    return {**alone, "mixed": mixed}


def _stopping(request: Submit) -> Submit:
    return replace(request, stop_ids=STOPS) if request.sampling.min_tokens else request


def check(folder: Path, kind: str, dtype: str, side: Side = Side.GPU, count: int = 5) -> str:
    """Raise AssertionError if something differs; else say what was compared. `count`: requests of
    a batch; references take longer for each than a GPU."""
    make_model(folder, kind, is_decisive=dtype != "float32")
    engines = Engines(folder, dtype, side)
    graphs, num_single = _outputs(engines, count)
    assert side is not Side.GPU or num_single == 0, f"{num_single} decode steps were no graphs"
    eager, _ = _outputs(engines, count, enforce_eager=True)
    for name, ours in graphs.items():
        assert _given(ours) == _given(eager[name]), f"{name}: graph and eager"
    # References need no comparison with themselves.
    compared = _against_reference(engines, count) if side is Side.GPU else "references"
    tokens = sum(len(t) for ours in graphs.values() for t in tokens_of(ours).values())
    said = f"graph = eager ({tokens} tokens); {compared}"
    if dtype == "float32":
        said += f"; {_against_cpu(engines, count, graphs)}"
    return said


def _outputs(engines: Engines, count: int, **more: object) -> tuple[dict[str, Outputs], int]:
    """Of each batch; and how many steps that only decode were launched kernel by kernel."""
    singles = 0
    begin_any = ModelRunner._begin_any

    def counting(runner: ModelRunner, plan: Plan, inputs: StepInputs) -> Any:
        nonlocal singles
        singles += inputs.is_decode
        return begin_any(runner, plan, inputs)

    with mock.patch.object(ModelRunner, "_begin_any", counting):
        loop = engines.loop(enable_prefix_caching=False, **more)
        try:
            return {name: run(loop, batch) for name, batch in batches(count).items()}, singles
        finally:
            loop.close()


def _given(outputs: Outputs) -> dict[int, tuple[list[int], list[TokenLogprobs]]]:
    return {
        number: (tokens, [entry for output in outputs[number] for entry in output.logprobs])
        for number, tokens in tokens_of(outputs).items()
    }


def _against_reference(engines: Engines, count: int) -> str:
    record = Record(getattr(torch, engines.dtype))
    with all_checked(record):
        loop = engines.loop(enforce_eager=True)
    try:
        record.is_on = True
        for name in ("mixed", "all"):
            run(loop, batches(count)[name])
    finally:
        loop.close()
    return record.check()


def _against_cpu(engines: Engines, count: int, computed: dict[str, Outputs]) -> str:
    made_there, _ = _outputs(replace(engines, side=Side.CPU), count)
    pairs = [
        (tokens, tokens_of(made_there[name])[number])
        for name, ours in computed.items()
        for number, tokens in tokens_of(ours).items()
    ]
    same = sum(ours == theirs for ours, theirs in pairs)
    assert same >= SAME_AS_CPU * len(pairs), f"{same} of {len(pairs)} requests are as on the CPU"
    return f"{same} of {len(pairs)} requests have the CPU's tokens"
