"""F08: adapters on recurrent mixers, gated attention and shared experts give PEFT's logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.lora.targets import Targets
from manyroots.store.adapter_files import read_adapter
from tests.helpers.adapter_folders import Recipe, rewrite_weights, write_adapter
from tests.unit.models.peft_models import ADAPTERS, ATTENTION, MLP, make_pair
from tests.unit.models.test_peft_parity import prompt, run
from tests.unit.models.tiny import load_tiny, save_tiny

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


PARTS: dict[str, list[list[str]]] = {
    "qwen3-next": [["in_proj_qkvz"], ["in_proj_ba"]],
    "qwen3.5": [
        ["in_proj_qkv"], ["in_proj_z"], ["in_proj_b"], ["in_proj_a"], ["in_proj_z", "in_proj_b"],
    ],
    "qwen3.5-moe": [["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"]],
}  # fmt: skip
OTHERS = {
    "qwen3-next": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"],
    "qwen3.5": ["in_proj_qkvz", "in_proj_ba"],
}
"""What the other of the two calls them."""


@pytest.mark.parametrize("kind", PARTS)
def test_any_part_of_a_delta_nets_input_may_be_adapted_alone_f08(kind: str, tmp_path: Path) -> None:
    """F08, SGLang #30168 and #30499, vLLM #47639: adapters of some of these projections crashed at
    start, were dropped without a word (betas and decays), or crashed where the rest was missing."""
    adapters: dict[str, dict[str, Any]] = {
        f"adapter{number}": {"r": 4, "lora_alpha": 64, "target_modules": parts}
        for number, parts in enumerate(PARTS[kind])
    }
    pair = make_pair(tmp_path, kind, adapters, **SIZES.get(kind, {}))
    requests: dict[str, tuple[str | None, list[int]]] = {"base": (None, prompt(50, 17))}
    base = pair.expected(None, prompt(1, 19))
    for index, name in enumerate(adapters):
        requests[name] = (name, prompt(index, 9 + 3 * index))
        moved = pair.expected(name, prompt(1, 19)) - base
        assert moved.abs().max() > 0.01, f"{name} changes something"
    run(pair, requests, 7)


@pytest.mark.parametrize(
    ("kind", "other"), [(k, name) for k, names in OTHERS.items() for name in names]
)
@pytest.mark.parametrize("is_in_file", [True, False])
def test_the_other_models_projections_are_refused_by_name_f08(
    kind: str, other: str, is_in_file: bool, tmp_path: Path
) -> None:
    """F08, SGLang #30499: never dropped, whether the file has them or the config alone names them.
    Which of its rows are whose is not said anywhere, so none is guessed."""
    targets = tiny_targets_of(kind, tmp_path)
    modules = ("q_proj",) if is_in_file else ("q_proj", other)
    config = {"target_modules": None if is_in_file else list(modules)}
    write_adapter(tmp_path / "a", targets, Recipe(rank=4, modules=("q_proj",), config=config))

    def add(tensors: dict[str, Tensor]) -> None:
        name = f"base_model.model.model.layers.0.linear_attn.{other}"
        tensors[f"{name}.lora_A.weight"] = torch.ones(4, 48)
        tensors[f"{name}.lora_B.weight"] = torch.ones(48, 4)

    if is_in_file:
        rewrite_weights(tmp_path / "a", add)
    with pytest.raises(AdapterError, match=rf"\b{other}\b"):
        read_adapter(tmp_path / "a", targets, max_rank=8, dtype=torch.float32, vocab_size=97)


def respelled(folder: Path, old: str, new: str) -> None:
    """The adapter's file with other names in it."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    rewrite_weights(folder, change)


@pytest.mark.parametrize(
    ("kind", "modules", "old", "new"),
    [
        ("qwen3.5", MIXERS["qwen3.5"], "model.layers.", "model.language_model.layers."),
        ("qwen3-next", MIXERS["qwen3-next"], "base_model.model.", ""),
        ("granite-h", ["router"], ".router.lora", ".router.layer.lora"),
    ],
)
def test_other_spellings_of_names_read_the_same_f08(
    kind: str, modules: list[str], old: str, new: str, tmp_path: Path
) -> None:
    """F08: of checkpoints with images, without PEFT's prefix, and of older releases."""
    targets = tiny_targets_of(kind, tmp_path)
    recipe = Recipe(rank=4, modules=tuple(modules), config={"target_modules": "all-linear"})
    write_adapter(tmp_path / "plain", targets, recipe)
    write_adapter(tmp_path / "other", targets, recipe)
    respelled(tmp_path / "other", old, new)
    plain, other = (
        read_adapter(tmp_path / name, targets, max_rank=8, dtype=torch.float32, vocab_size=97)[1]
        for name in ("plain", "other")
    )
    assert plain.pairs.keys() == other.pairs.keys()
    assert len(plain.pairs) >= len(modules)
    for name, pair in plain.pairs.items():
        assert torch.equal(pair.a, other.pairs[name].a)
        assert torch.equal(pair.b, other.pairs[name].b)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("qwen3.5", "linear_attn.conv1d"),
        ("qwen3-next", "linear_attn.in_proj_qkv"),
        ("granite-h", "mamba.conv1d"),
        ("falcon-h1", "mamba.dt_bias"),
    ],
)
def test_what_no_adapter_may_change_is_refused_by_its_name_f08(
    kind: str, module: str, tmp_path: Path
) -> None:
    """F08: a convolution, the other model's projection, a number per head; never dropped."""
    targets = tiny_targets_of(kind, tmp_path)
    write_adapter(tmp_path / "a", targets, Recipe(rank=4, config={"target_modules": None}))
    name = f"model.layers.0.{module}"

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(4, 48)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(48, 4)

    rewrite_weights(tmp_path / "a", add)
    with pytest.raises(AdapterError, match=re.escape(name)):
        read_adapter(tmp_path / "a", targets, max_rank=8, dtype=torch.float32, vocab_size=97)


def tiny_targets_of(kind: str, folder: Path) -> Targets:
    save_tiny(folder / "base", kind)
    return load_tiny(folder / "base").adapter_targets()
