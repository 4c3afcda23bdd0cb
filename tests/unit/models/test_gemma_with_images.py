"""Checkpoints of Gemma 3 that can see: their text model is served, however they spell its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from manyroots.errors import AdapterError, ModelError
from manyroots.ids import AdapterSlot
from manyroots.kernels.tolerances import assert_close
from manyroots.models.weights.safetensors import SINGLE_FILE
from tests.helpers.adapter_folders import Recipe, rewrite_config, rewrite_weights, write_adapter
from tests.unit.models.paged import PagedModel
from tests.unit.models.peft_models import pool_for, read
from tests.unit.models.test_logits_parity import expected, prompts
from tests.unit.models.tiny import load_tiny, tiny_config

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}  # fmt: skip
OLD_NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
EMBEDDING = "language_model.model.embed_tokens.weight"


def save(folder: Path) -> Any:
    torch.manual_seed(1)
    config = Gemma3Config(
        text_config=tiny_config("gemma3").to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        architectures=["Gemma3ForConditionalGeneration"],
        dtype="float32",
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def test_q01_quantization_of_the_text_model_alone_counts(tmp_path: Path) -> None:
    """Q01: as transformers reads it, where the whole model's config has none."""
    save(tmp_path)
    awq = {"quant_method": "awq", "bits": 4}
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["quantization_config"] = awq
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantized \(method 'awq'\)"):
        load_tiny(tmp_path)


def rename(folder: Path, names: dict[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in load_file(folder / SINGLE_FILE).items():
        for new, old in names.items():
            if name.startswith(new):
                name = old + name.removeprefix(new)
                break
        renamed[name] = tensor
    save_file(renamed, folder / SINGLE_FILE, metadata={"format": "pt"})
    return renamed


@pytest.mark.parametrize("names", [{}, OLD_NAMES], ids=["as now", "as published"])
def test_text_gives_transformers_logits(names: dict[str, str], tmp_path: Path) -> None:
    """F01."""
    theirs = save(tmp_path)
    saved = rename(tmp_path, names)
    assert any("vision_tower" in name for name in saved)
    ours = load_tiny(tmp_path)
    tokens = {name: [t for t in ids if t < 90] for name, ids in prompts().items()}
    for name, logits in PagedModel(ours).step(tokens).items():
        assert_close("logits", logits, expected(theirs, tokens[name]), torch.float32)


def test_a_head_of_its_own_is_seen_by_its_old_name_too(tmp_path: Path) -> None:
    save(tmp_path)
    saved = rename(tmp_path, OLD_NAMES)
    saved["language_model.lm_head.weight"] = saved[EMBEDDING] + 1.0
    save_file(saved, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    assert not load_tiny(tmp_path).spec.tie_word_embeddings


@pytest.mark.parametrize("spelled", ["model.", "model.language_model.", "language_model.model."])
def test_adapters_of_the_text_model_are_read_by_every_name_of_it(
    spelled: str, tmp_path: Path
) -> None:
    save(tmp_path / "base")
    ours = load_tiny(tmp_path / "base")
    wanted = write_adapter(tmp_path / "a", ours.adapter_targets(), Recipe(seed=3))

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", f"base_model.model.{spelled}")] = (
                tensors.pop(name)
            )

    rewrite_weights(tmp_path / "a", change)
    _, weights = read(tmp_path / "a", ours)
    assert weights.pairs.keys() == wanted.keys()
    for name, pair in weights.pairs.items():
        assert torch.equal(pair.a, wanted[name].a), name
        assert torch.equal(pair.b, wanted[name].b), name


def test_adapters_of_the_part_that_sees_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "base")
    ours = load_tiny(tmp_path / "base")
    write_adapter(tmp_path / "a", ours.adapter_targets(), Recipe(modules=("q_proj",)))

    def change(tensors: dict[str, Tensor]) -> None:
        name = next(iter(tensors))
        seeing = name.replace("model.layers.", "model.vision_tower.encoder.layers.")
        tensors[seeing] = tensors.pop(name)

    rewrite_weights(tmp_path / "a", change)
    with pytest.raises(AdapterError, match="vision_tower"):
        read(tmp_path / "a", ours)


TEXT = r".*language_model.*\.(q_proj|up_proj)"
FIRST = "layers.0.self_attn.q_proj"
OPTIONS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*vision_tower.*"},
    {"target_modules": "all-linear", "exclude_modules": r".*(vision_tower|multi_modal).*"},
    {"target_modules": [f"model.language_model.{FIRST}", "language_model.layers.1.mlp.up_proj"]},
    {"target_modules": TEXT, "alpha_pattern": {f"^model.language_model.{FIRST}": 64}},
    {"target_modules": TEXT, "alpha_pattern": {f"language_model.{FIRST}": 64}},
    {"target_modules": TEXT, "alpha_pattern": {f"^model.{FIRST}": 64, "up_proj": 3}},
    {"target_modules": TEXT, "alpha_pattern": {f"model.{FIRST}": 64}},
    {"target_modules": TEXT, "rank_pattern": {r".*language_model.*q_proj": 2}},
    {"target_modules": TEXT, "rank_pattern": {r".*vision_tower.*q_proj": 2}},
    {"target_modules": rf"{TEXT}|lm_head", "alpha_pattern": {"lm_head": 1}},
]


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_w13_patterns_go_by_the_names_of_the_model_that_was_trained(tmp_path: Path) -> None:
    """W13: they have a part that names of the text model alone have not; keys without it match
    nothing there, and none of ours."""
    theirs = save(tmp_path / "base")
    ours = load_tiny(tmp_path / "base")
    pool = pool_for(ours, num_slots=len(OPTIONS))
    paged = PagedModel(ours, pool)
    tokens = [1, 2, 3, 7, 8, 4, 5, 6, 9, 33, 21]
    wanted, base = {}, expected(theirs, tokens)
    for slot, options in enumerate(OPTIONS):
        torch.manual_seed(slot)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)
        adapted = get_peft_model(theirs, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter += torch.randn_like(parameter) * 0.1
        adapted.save_pretrained(tmp_path / str(slot))
        wanted[str(slot)] = adapted.eval()(input_ids=torch.tensor([tokens])).logits[0]
        theirs = adapted.unload()
        pool.load(AdapterSlot(slot), read(tmp_path / str(slot), ours)[1])
        paged.slot_of[str(slot)] = slot
    for name, logits in paged.step(dict.fromkeys(wanted, tokens)).items():
        assert (wanted[name] - base).abs().max() > 0.1, OPTIONS[int(name)]
        assert_close("logits", logits, wanted[name], torch.float32)


def test_w12_a_module_of_the_text_model_that_the_file_lacks_is_missed(tmp_path: Path) -> None:
    """W12: what may be of the part that sees is not."""
    save(tmp_path / "base")
    ours = load_tiny(tmp_path / "base")
    recipe = Recipe(modules=("q_proj",), prefix="base_model.model.model.language_model.")
    names = [name.removeprefix("model.") for name in ours.adapter_targets() if "q_proj" in name]
    targets = {name: ours.adapter_targets()[f"model.{name}"] for name in names}
    write_adapter(tmp_path / "a", targets, recipe)
    read(tmp_path / "a", ours)
    rewrite_config(tmp_path / "a", target_modules=r".*language_model.*\.(q|v)_proj")
    with pytest.raises(AdapterError, match="v_proj, for which the file has no weights"):
        read(tmp_path / "a", ours)
