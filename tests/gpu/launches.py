"""Kernels that begin before their inputs are there give what they give one after the other.

The same kernels, launched early and launched plainly, leave the same bits everywhere: tokens,
distributions, and every key and value of every layer. What is read before it is written would
differ, sooner or later; models are larger here than elsewhere, so that kernels overlap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyroots.kernels import launch
from tests.gpu import requests as made
from tests.gpu.engines import Engines, Outputs, Side, run, tokens_of
from tests.gpu.models import VOCAB, make_model
from tests.gpu.scores import flat, output_scores

KINDS = ("llama", "qwen3-moe")
ROUNDS = 3
_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.03,
}


def _everything(engines: Engines, *, early: bool) -> tuple[list[Outputs], Tensor]:
    """Outputs of several rounds, and all pages as they are at the end."""
    launch.LAUNCH_EARLY = early
    try:
        # Pages keep what the last round wrote, whoever finds them.
        loop = engines.loop(enable_prefix_caching=False)
        try:
            for batch in made.loads():
                run(loop, batch)
            batches = [made.few(), made.many(), made.few(logprobs=VOCAB)]
            outputs = [run(loop, batch) for _ in range(ROUNDS) for batch in batches]
            return outputs, loop._runner._arena.data.clone()
        finally:
            loop.close()
    finally:
        launch.LAUNCH_EARLY = True


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if a bit differs; else say what was compared."""
    sizes = dict(_SIZES)
    if kind == "qwen3-moe":
        sizes["moe_intermediate_size"] = 512
    make_model(folder, kind, is_decisive=False, **sizes)
    engines = Engines(folder, dtype, Side.GPU)
    assert launch.is_dependent(torch.device("cuda")), "this GPU launches nothing early"
    early, early_pages = _everything(engines, early=True)
    plain, plain_pages = _everything(engines, early=False)
    for number, (ours, theirs) in enumerate(zip(early, plain, strict=True)):
        assert tokens_of(ours) == tokens_of(theirs), f"{kind} {dtype}: tokens of batch {number}"
        if number % 3 == 2:
            same = torch.equal(flat(output_scores(ours)), flat(output_scores(theirs)))
            assert same, f"{kind} {dtype}: distributions of batch {number}"
    same = torch.equal(early_pages, plain_pages)
    assert same, f"{kind} {dtype}: keys and values"
    count = sum(len(news) for outputs in early for news in tokens_of(outputs).values())
    return f"{kind} {dtype}: launched early = plainly, bit by bit ({count} tokens, all pages)"
