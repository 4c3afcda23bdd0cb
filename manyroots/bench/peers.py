"""The systems measured beside ours, each run as its own users would run it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch


class TransformersPeer:
    """transformers' `generate`, greedy, one padded batch, nothing reused."""

    name = "transformers generate"

    def __init__(self, model_path: str, dtype: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        path = Path(model_path)
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
        if path.is_file():
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self._device = device
        self._model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
        self._model.to(device).eval()
        # Every sequence runs to its full length, as in our own run.
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each prompt."""
        longest = max(len(prompt) for prompt in prompts)
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs = torch.tensor(padded, device=self._device)
        attention_mask = torch.tensor(mask, device=self._device)
        began = time.perf_counter()
        output = self._model.generate(
            input_ids=inputs,
            attention_mask=attention_mask,
            do_sample=False,
            max_new_tokens=num_new_tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - began
        return seconds, output[:, longest:].tolist()
