"""The adapters that ship with the examples are what the trainer writes and the server loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from speech.styles import STYLES, Style

ADAPTERS = Path(__file__).parents[3] / "examples" / "adapters"
NUM_LAYERS = 30
MAX_BYTES = 3_000_000

each_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


@each_style
def test_the_config_is_the_styles_and_names_the_public_model(style: Style) -> None:
    config = json.loads((ADAPTERS / style.name / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == style.rank
    assert config["lora_alpha"] == style.alpha
    assert sorted(config["target_modules"]) == sorted(style.target_modules)
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # Everything a loader could stumble over is at PEFT's plain setting.
    assert config["bias"] == "none"
    assert not config["use_dora"]
    assert not config["use_rslora"]
    assert not config["modules_to_save"]


@each_style
def test_the_weights_are_one_pair_for_each_module_small_and_in_bfloat16(style: Style) -> None:
    path = ADAPTERS / style.name / "adapter_model.safetensors"
    assert path.stat().st_size < MAX_BYTES
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(tensors) == 2 * NUM_LAYERS * len(style.target_modules)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, name
        assert tensor.shape[0 if "lora_A" in name else 1] == style.rank, name
        assert tensor.isfinite().all(), name
        assert tensor.any(), f"{name} changes nothing"


@each_style
def test_a_folder_holds_an_adapter_and_its_card_and_nothing_else(style: Style) -> None:
    names = {path.name for path in (ADAPTERS / style.name).iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
