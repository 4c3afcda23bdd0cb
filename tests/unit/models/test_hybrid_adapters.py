"""F08: adapters on recurrent mixers, gated attention and shared experts give PEFT's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.peft_models import ADAPTERS, ATTENTION, MLP, make_pair
from tests.unit.models.test_peft_parity import prompt, run

MIXERS = {
    "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "qwen3.5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "qwen3.5-moe": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "granite-h": ["in_proj", "out_proj"],
    "granite-h-dense": ["in_proj", "out_proj"],
    "falcon-h1": ["in_proj"],  # PEFT refuses its out_proj
}
BLOCKS = {
    # PEFT turns adapters of any gate_proj or down_proj into those of all experts.
    "qwen3-next": ["shared_expert_gate"],
    "qwen3.5": ["gate_proj", "up_proj", "down_proj"],
    "qwen3.5-moe": ["shared_expert.down_proj", "shared_expert_gate"],
    "granite-h": ["input_linear", "output_linear"],
    "granite-h-dense": ["input_linear", "output_linear"],
    "falcon-h1": ["gate_proj", "up_proj", "down_proj"],
}
SIZES: dict[str, dict[str, Any]] = {
    # With gate and up together as wide as the model, PEFT's flat format would have two readings.
    "qwen3-next": {"moe_intermediate_size": 20},
    "qwen3.5-moe": {"moe_intermediate_size": 20},
    "granite-h": {"intermediate_size": 20},
}


@pytest.mark.parametrize("kind", MIXERS)
def test_adapters_of_hybrids_give_pefts_logits_f08(kind: str, tmp_path: Path) -> None:
    """F08, W14: each mixer's projections alone, all that PEFT calls all-linear (experts and
    routers, too), ends, and all with the base in one batch, in chunks and token by token."""
    # PEFT refuses what its own word for everything includes there.
    every = [*MIXERS[kind], *ATTENTION, *MLP] if kind == "falcon-h1" else "all-linear"
    adapters: dict[str, dict[str, Any]] = {
        "mixers": {"r": 4, "lora_alpha": 16, "target_modules": MIXERS[kind]},
        "all linear": {"r": 8, "lora_alpha": 16, "target_modules": every},
        "blocks": {"r": 3, "lora_alpha": 9, "target_modules": [*ATTENTION, *BLOCKS[kind]]},
        "ends": ADAPTERS["embedding and head"],
    }
    pair = make_pair(tmp_path, kind, adapters, **SIZES.get(kind, {}))
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 17))}
    base = pair.expected(None, prompt(1, 19))
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 11 + 5 * index))
        moved = pair.expected(name, prompt(1, 19)) - base
        assert moved.abs().max() > 0.05, f"{name} changes something"
    for chunk in (1, 7):
        run(pair, requests, chunk)
