"""A tiny model with a tokenizer and adapters for it, on disk, and what PEFT says they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tests.helpers.adapter_folders import Recipe, write_adapter
from tests.unit.models.tiny import load_tiny, save_tiny
from tests.unit.text.tiny_tokenizer import tiny_backend

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RECIPES = {
    "all": Recipe(rank=8, modules=(*ATTENTION, "gate_proj", "up_proj", "down_proj"), seed=1),
    "few": Recipe(rank=3, modules=("q_proj", "down_proj"), alpha=4, seed=2),
    "stable": Recipe(rank=16, modules=ATTENTION, is_rank_stabilised=True, seed=3),
    "other": Recipe(rank=8, modules=ATTENTION, seed=4),
}


class TinyAdapters:
    """A folder with `model` and `adapters/NAME`."""

    def __init__(self, folder: Path, kind: str = "llama") -> None:
        """Of other kinds than a Llama there are no adapters but those that are written later."""
        self.model = folder / "model"
        self.dirs = folder / "adapters"
        self.slow = folder / "slow"
        """For `slow_steps`, by tests that make it."""
        self._theirs: Any = save_tiny(self.model, kind, vocab_size=300)
        self._theirs.generation_config.eos_token_id = None
        self._known: dict[Any, list[int]] = {}
        tiny_backend().save(str(self.model / "tokenizer.json"))
        self.targets = load_tiny(self.model).adapter_targets()
        for name, recipe in RECIPES.items() if kind == "llama" else ():
            self.write(name, recipe)

    def write(self, name: str, recipe: Recipe) -> Path:
        write_adapter(self.dirs / name, self.targets, recipe)
        return self.dirs / name

    def path(self, name: str) -> str:
        return str(self.dirs / name)

    def greedy(self, prompt: Sequence[int], adapter: str | None, count: int) -> list[int]:
        """What transformers, with PEFT for an adapter, gives for a prompt alone. It is asked once
        for each prompt and content of an adapter."""
        files = [] if adapter is None else [*(self.dirs / adapter).iterdir()]
        key = (tuple(prompt), adapter, tuple(sorted(file.stat().st_mtime_ns for file in files)))
        if len(self._known.get(key, ())) < count:
            self._known[key] = self._generated(prompt, adapter, count)
        return self._known[key][:count]

    def _generated(self, prompt: Sequence[int], adapter: str | None, count: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        arguments: dict[str, Any] = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
            "max_new_tokens": count, "pad_token_id": 0,
        }  # fmt: skip
        if adapter is None:
            return list(self._theirs.generate(**arguments)[0, len(prompt) :].tolist())
        wrapped = PeftModel.from_pretrained(self._theirs, self.path(adapter))
        try:
            return list(wrapped.generate(**arguments)[0, len(prompt) :].tolist())
        finally:
            wrapped.unload()
