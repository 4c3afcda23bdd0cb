"""The hidden state after a prompt (G05): through the real engine, as transformers computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from manyroots import LLM, SamplingParams
from manyroots.messages import StepOutputs
from tests.helpers.tiny_adapters import TinyAdapters

HIDDEN = SamplingParams(temperature=0, max_tokens=1, wants_hidden=True)
PROMPTS = [[72, 101, 32, 7, 101, 120, 55, 31, 9, 40, 41], [72, 101, 32, 7, 101, 120, 55, 31, 50]]


def test_g05_the_state_is_that_of_the_last_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G05: cold, from the cache, in chunks, and beside rows that generate."""
    model = TinyAdapters(tmp_path).model
    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [
            reference(torch.tensor([prompt])).last_hidden_state[0, -1].tolist()
            for prompt in PROMPTS
        ]
    settings = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64}
    with LLM(str(model), **settings, max_num_batched_tokens=6, max_num_seqs=4) as llm:  # type: ignore[arg-type]
        found: list[tuple[float, ...]] = []
        step = llm._loop.step

        def watched() -> StepOutputs:
            outputs = step()
            ended = sorted(outputs, key=lambda output: output.request_id)
            notices = [output.notice for output in ended if output.notice is not None]
            found.extend(notice.hidden for notice in notices if notice.hidden)
            return outputs

        monkeypatch.setattr(llm._loop, "step", watched)
        for _ in range(2):
            for prompt, expected in zip(PROMPTS, wanted, strict=True):
                found.clear()
                others = SamplingParams(temperature=0, max_tokens=3)
                llm.generate([prompt, PROMPTS[0]], [HIDDEN, others])
                [state] = found
                assert state == pytest.approx(expected, abs=1e-4)
