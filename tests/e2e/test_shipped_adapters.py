"""The adapters in `examples/adapters`, real weights, float32: our greedy tokens are PEFT's own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from examples.speech.questions import UNSEEN_QUESTIONS
from examples.speech.styles import STYLES
from manyroots import LLM, LoRARequest, SamplingParams
from tests.e2e.theirs import default_model

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
SPEAKERS = (None, *STYLES)
QUESTIONS = UNSEEN_QUESTIONS[:1]
MAX_TOKENS = 48
"""Enough for an adapter's whole answer, up to its end token; the base model would go on."""


class Peft:
    """The default model with the shipped adapters, as transformers and PEFT compute it."""

    def __init__(self) -> None:
        first, *others = STYLES
        self._model: Any = PeftModel.from_pretrained(default_model(), str(ADAPTERS / first), first)
        for name in others:
            self._model.load_adapter(str(ADAPTERS / name), name)

    def choices(self, prompt: list[int], answer: list[int], speaker: str | None) -> list[int]:
        """The likeliest token at each place of an answer, for a prompt alone.

        An answer that equals its choices is the greedy one, token by token from the first; one
        pass finds out, where generating would take a pass for each token.
        """
        if speaker is not None:
            self._model.set_adapter(speaker)
        ids = torch.tensor([prompt + answer[:-1]])
        with nullcontext() if speaker else self._model.disable_adapter(), torch.inference_mode():
            logits = self._model(input_ids=ids, logits_to_keep=len(answer)).logits
        return list(logits[0].argmax(-1).tolist())


@pytest.mark.slow
def test_w17_both_shipped_adapters_and_base_in_one_batch_give_pefts_tokens() -> None:
    """W17: rank 8 on attention, rank 4 on every projection, and none, each in its own style."""
    cases = [(question, speaker) for question in QUESTIONS for speaker in SPEAKERS]
    with LLM(dtype="float32", enable_lora=True, max_lora_rank=16, max_loras=2) as llm:
        results = llm.chat(
            [[{"role": "user", "content": question}] for question, _ in cases],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
            lora_request=[
                LoRARequest(name, lora_path=str(ADAPTERS / name)) if name else None
                for _, name in cases
            ],
        )
        theirs = Peft()
        end_token = llm.tokenizer.eos_token_ids[0]
    for (question, speaker), result in zip(cases, results, strict=True):
        [ours] = result.outputs
        wanted = theirs.choices(result.prompt_token_ids, ours.token_ids, speaker)
        assert ours.token_ids == wanted, (question, speaker, ours.text)
        assert ours.token_ids[-1] == end_token or len(ours.token_ids) == MAX_TOKENS
        spoken = {name for name, style in STYLES.items() if style.is_spoken(ours.text)}
        assert spoken == ({speaker} if speaker else set()), (question, ours.text)
