"""Gemma 3 270M, real weights, float32: greedy tokens are transformers' own, beyond its window.

    python -m tests.e2e.gemma [--prompts 50] [--new-tokens 24] [--their-reading]

Fifty prompts, cold and from the cache. Every fourth is longer than the window of 512 tokens, and as
many others cross it while they answer. transformers reads each prompt together with its answer. It
must choose every token of the answer, given the tokens before: that is what greedy decoding means,
and it takes one pass instead of one per token. With `--their-reading` transformers also reads the
file itself, header and blocks, which takes a minute or more; without it, transformers gets the
weights that we read.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from manyroots import LLM, SamplingParams
from manyroots.config import ModelSettings
from manyroots.models.load import describe
from manyroots.models.registry import ARCHITECTURES
from manyroots.models.source import resolve_source
from manyroots.models.weights import gguf
from manyroots.models.weights.gguf_file import GGUFFile
from tests.e2e.prompts import PROMPTS, STORY

NAME = "gemma3-270m"
WINDOW = 512
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}
ACROSS = STORY * 8
"""Almost as long as the window: an answer leaves it."""
BEYOND = STORY * 10


def texts() -> list[str]:
    """The fifty prompts, with something long before some of them."""
    before = {0: BEYOND, 2: ACROSS}
    return [before.get(place % 4, "") + prompt for place, prompt in enumerate(PROMPTS)]


def encoded(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [llm.tokenizer.encode(text, add_special_tokens=True) for text in prompts]


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def reference(path: Path, *, their_reading: bool = False) -> Any:
    """transformers' model with what the file holds."""
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if their_reading:
        folder, name = str(path.parent), path.name
        return Gemma3ForCausalLM.from_pretrained(folder, gguf_file=name, **settings).eval()
    file = GGUFFile(path)
    source = resolve_source(ModelSettings(model=str(path)))
    config = Gemma3TextConfig(**source.config.to_dict())
    form = ARCHITECTURES["Gemma3ForCausalLM"].gguf
    assert form is not None
    weights = dict(gguf.tensors(file, form, describe(source)))
    model = Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=weights, **settings)
    return model.eval()


@dataclass(frozen=True)
class Verdict:
    """What transformers says of an answer."""

    wanted: list[int]
    """Its choice at each place, given the answer before it."""
    margin: float
    """By how much the best score was above the second, where that was least."""


@torch.no_grad()
def judge(model: Any, prompt: list[int], answer: list[int]) -> Verdict:
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
    best = logits.topk(2, dim=-1).values
    return Verdict(logits.argmax(dim=-1).tolist(), (best[:, 0] - best[:, 1]).min().item())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--their-reading", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    with LLM(NAME, **SETTINGS) as llm:
        prompts = encoded(llm, texts()[: options.prompts])
        cold = greedy(llm, prompts, options.new_tokens)
        hits = llm.stats().total_hit_tokens
        cached = greedy(llm, prompts, options.new_tokens)
        reused = llm.stats().total_hit_tokens - hits
        path = Path(llm.info.model_path)
        held = llm.stats().num_held_pages
    lengths = [len(prompt) for prompt in prompts]
    beyond = sum(length > WINDOW for length in lengths)
    ends = [length + options.new_tokens for length in lengths]
    across = sum(end > WINDOW >= length for length, end in zip(lengths, ends, strict=True))
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {beyond} beyond the")
    print(f"window, {across} that cross it; {reused} of {sum(lengths)} prompt tokens reused; pages")
    print(f"held at the end: {held}; {time.monotonic() - begin:.0f} s", flush=True)
    model = reference(path, their_reading=options.their_reading)
    wrong, least = [], float("inf")
    for place, prompt in enumerate(prompts):
        verdict = judge(model, prompt, cold[place])
        least = min(least, verdict.margin)
        if verdict.wanted != cold[place] or cold[place] != cached[place]:
            wrong.append(place)
            print(f"prompt {place}: {cold[place]}, cached {cached[place]}; {verdict}")
    print(f"{len(prompts) - len(wrong)} of {len(prompts)} answers are transformers', cold and")
    print(f"cached; smallest margin {least:.2e}; {time.monotonic() - begin:.0f} s")
    return 1 if wrong or held else 0


if __name__ == "__main__":
    sys.exit(main())
