"""Adapters of each architecture give PEFT's logits, by one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.peft_models import ADAPTERS, make_pair
from tests.unit.models.test_peft_parity import prompt, run

KINDS: dict[str, dict[str, Any]] = {
    "llama-biased": {},
    "granite": {},
    "smollm3": {},
    # With gate and up together as wide as the model, PEFT's flat format would have two readings.
    "mixtral": {"intermediate_size": 20},
    "ministral": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "phi3-long": {},
    "glm4-moe": {},
    "gemma2": {},
    "nemotron-h": {},
    "deepseek-v2": {},
    "deepseek-v2-lite": {},
    "deepseek-v3": {},
    "deepseek-v32": {},
    "deepseek-v4": {},
    "glm4-moe-lite": {},
    "glm-moe-dsa": {},
    "minicpm3": {},
    "kimi-linear": {},
}
"""Kinds, and sizes that differ from the usual ones."""
TARGETS = {
    "nemotron-h": ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    # All but o_a_proj, of which PEFT adds all groups' output to each group's.
    "deepseek-v4": [
        "q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj",
        "weights_proj",
    ],
}  # fmt: skip
"""What PEFT takes, where it refuses what its own word for everything includes."""
ENDS = {"nemotron-h": {"target_modules": ["lm_head", "q_proj"]}}
"""Its embedding has another name there, under which adapters of it are refused."""


@pytest.mark.parametrize("kind", KINDS)
def test_w14_adapters_of_every_product_give_pefts_logits(kind: str, tmp_path: Path) -> None:
    """W14, W17: all that PEFT calls all-linear, ends, and both with the base in one batch; at once,
    in chunks and token by token."""
    adapters: dict[str, dict[str, Any]] = {
        "all linear": {"r": 8, "lora_alpha": 16, "target_modules": TARGETS.get(kind, "all-linear")},
        "ends": {**ADAPTERS["embedding and head"], **ENDS.get(kind, {})},
    }
    pair = make_pair(tmp_path, kind, adapters, **KINDS[kind])
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 19))}
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 13 + 7 * index))
        moved = pair.expected(name, prompt(1, 19)) - pair.expected(None, prompt(1, 19))
        assert moved.abs().max() > 0.1, "it changes something"
    for chunk in (None, 1, 7):
        run(pair, requests, chunk)
