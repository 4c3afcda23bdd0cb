"""Kernels that begin before their inputs are there give what they give one after the other.

The same kernels, launched early and launched plainly, leave the same bits everywhere: tokens,
distributions, and every key and value of every layer. What is read before it is written would
differ, sooner or later; models are larger here than elsewhere, so that kernels overlap. Each way
to launch is compiled apart, in a process of its own: `python -m tests.gpu.launches` is one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyroots.kernels import launch
from tests.gpu import requests as made
from tests.gpu.engines import Engines, Side, run, tokens_of
from tests.gpu.models import VOCAB, make_model
from tests.gpu.scores import flat, output_scores

KINDS = ("llama", "qwen3-moe")
ROUNDS = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.03,
}


def everything(engines: Engines, *, early: bool) -> list[Tensor]:
    """All tokens and distributions of several rounds, and all pages as they are at the end."""
    launch.LAUNCH_EARLY = early
    # Without a cache, every round computes everything again.
    loop = engines.loop(enable_prefix_caching=False)
    found = []
    try:
        for batch in made.loads():
            run(loop, batch)
        for _ in range(ROUNDS):
            for batch in (made.few(), made.many(), made.few(count=7, logprobs=VOCAB)):
                outputs = run(loop, batch)
                found += [torch.tensor(tokens) for tokens in tokens_of(outputs).values()]
            found.append(flat(output_scores(outputs)))
        return [*found, *(arena.data.cpu() for arena in loop._runner._arenas)]
    finally:
        loop.close()
        launch.LAUNCH_EARLY = True


def check(folder: Path, kind: str, dtype: str) -> str:
    """Raise AssertionError if a bit differs; else say what was compared."""
    sizes = dict(_SIZES)
    if kind == "qwen3-moe":
        sizes["moe_intermediate_size"] = 512
    make_model(folder, kind, is_decisive=False, **sizes)
    assert launch.is_dependent(torch.device("cuda")), "this GPU launches nothing early"
    other = subprocess.Popen([sys.executable, "-m", "tests.gpu.launches", str(folder), dtype])
    early = everything(Engines(folder, dtype, Side.GPU), early=True)
    assert other.wait() == 0, "the process that launches plainly failed"
    plain = torch.load(folder / "plain.pt")
    assert len(early) == len(plain)
    for number, (ours, theirs) in enumerate(zip(early, plain, strict=True)):
        assert torch.equal(ours, theirs), f"result {number} of {len(early)}, {tuple(ours.shape)}"
    count = sum(len(ours) for ours in early if ours.dim() == 1)
    return f"launched early = plainly, bit by bit ({count} tokens, all pages)"


if __name__ == "__main__":
    home, name = Path(sys.argv[1]), sys.argv[2]
    torch.save(everything(Engines(home, name, Side.GPU), early=False), home / "plain.pt")
