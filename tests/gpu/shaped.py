"""Rows whose output has a shape, on a GPU: steps in two graphs beside the same kernels one by one.

Takes an empty folder, a kind of tiny model and a dtype; raises AssertionError on a difference, else
says what was compared. Free rows are in the same steps.
"""

from __future__ import annotations

import re
from pathlib import Path

from manyroots import LLM, SamplingParams, StructuredOutputsParams
from tests.unit.models.tiny import save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

KINDS = ("llama",)
EOS, NUM_PROMPTS, REGEX = 257, 12, "[a-f]{4,12}(x|y)"


def check(folder: Path, kind: str, dtype: str) -> str:
    save_tiny(folder, kind, vocab_size=300, eos_token_id=EOS)
    tiny_backend().save(str(folder / "tokenizer.json"))
    graphs, plain = (_texts(folder, dtype, eager) for eager in (False, True))
    assert graphs == plain, "two graphs give other tokens than their kernels one by one"
    shaped = graphs[::2]
    assert all(re.fullmatch(REGEX, text) for text in shaped), shaped
    return f"{len(shaped)} shaped texts and {len(graphs) - len(shaped)} free ones"


def _texts(folder: Path, dtype: str, eager: bool) -> list[str]:
    shaped = StructuredOutputsParams(regex=REGEX)
    asked = [
        SamplingParams(
            temperature=float(number % 3),
            seed=number,
            max_tokens=20,
            structured_outputs=None if number % 2 else shaped,
        )
        for number in range(NUM_PROMPTS)
    ]
    with LLM(str(folder), device="cuda", dtype=dtype, enforce_eager=eager) as llm:
        results = llm.generate([f"prompt {number}" for number in range(NUM_PROMPTS)], asked)
    return [result.outputs[0].text for result in results]
