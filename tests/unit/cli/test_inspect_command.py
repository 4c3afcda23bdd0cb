"""`manyroots adapters inspect`: what a folder holds, would it load, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from manyroots.cli.main import main
from manyroots.store.adapter_files import read_adapter
from tests.helpers.adapter_folders import (
    Recipe,
    rewrite_config,
    rewrite_weights,
    tiny_targets,
    write_adapter,
)
from tests.unit.models.gguf_writing import write_gguf

TARGETS = tiny_targets()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    write_adapter(path, TARGETS, Recipe(ranks={"lm_head": 2}, invocation_tokens=(5, 6)))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with the shapes of the targets, and no weights at all."""
    path = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    return path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main(["adapters", "inspect", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_it_says_what_the_folder_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = inspected(capsys, folder)
    spec, weights = read_adapter(folder, TARGETS, max_rank=16, dtype=torch.float32, vocab_size=64)
    assert code == 0
    assert report["digest"] == spec.digest.hex()
    assert report["rank"] == 4
    assert report["rank_pattern"] == {"lm_head": 2}
    assert report["invocation_tokens"] == [5, 6]
    assert report["num_bytes"] == weights.num_bytes
    modules = {module["name"]: module for module in report["modules"]}
    assert modules["model.layers.*.self_attn.q_proj"] == {
        "name": "model.layers.*.self_attn.q_proj",
        "num_pairs": 2,
        "a_shapes": [[4, 32]],
        "b_shapes": [[32, 4]],
    }
    assert set(modules) == {name.replace(".0.", ".*.").replace(".1.", ".*.") for name in TARGETS}


def test_people_get_a_table_and_the_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", "inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.up_proj" in out
    assert "acts from the tokens 5 6 on" in out
    assert "Files are in order" in out


def test_what_no_model_serves_is_refused_with_its_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_config(folder, use_dora=True)
    code, report = inspected(capsys, folder)
    assert code == 1
    assert "DoRA" in report["refused"]
    assert main(["adapters", "inspect", str(folder / "nowhere")]) == 1
    assert "Would not load" in capsys.readouterr().out


def test_a_limit_that_makes_no_sense_is_a_mistake_of_the_caller(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", "inspect", str(folder), "--max-lora-rank", "0"]) == 2
    assert "--max-lora-rank is 0" in capsys.readouterr().err


def test_with_a_model_it_says_whether_that_would_serve_it(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = inspected(capsys, folder, "--model", model)
    assert code == 0, report
    assert report["loads_as"] == {"rank": 4, "num_pairs": len(TARGETS)}


def test_with_a_model_it_says_why_that_would_not_serve_it(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = inspected(capsys, folder, "--model", model, "--max-lora-rank", 3)
    assert code == 1
    assert "--max-lora-rank 4" in report["refused"]
    other = tmp_path / "other"
    write_adapter(other, tiny_targets(hidden=40))
    code, report = inspected(capsys, other, "--model", model)
    assert code == 1
    assert "trained for this model" in report["refused"]
    assert report["rank"] == 4


@pytest.mark.parametrize("kind", ["folder", "tied folder", "gguf"])
@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_w12_base_weights_that_the_file_repeats_are_held_against_the_models(
    folder: Path, model: Path, kind: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """W12: as an engine does, where the model's weights are there."""
    config = LlamaConfig.from_pretrained(model, tie_word_embeddings=kind == "tied folder")
    theirs: Any = LlamaForCausalLM(config)
    weight = theirs.state_dict()[f"{module}.weight"].clone()

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{module}.base_layer.weight"] = weight

    rewrite_weights(folder, repeat)
    code, report = inspected(capsys, folder, "--model", model)
    assert (code, report["unchecked_base_weights"]) == (0, [module])
    assert main(["adapters", "inspect", str(folder), "--model", str(model)]) == 0
    assert f"repeats {module} of the model, whose weights are not here" in capsys.readouterr().out
    if kind == "gguf":
        model = write_gguf(model.parent / "model.gguf", config, theirs.state_dict())
    else:
        theirs.save_pretrained(model)
    code, report = inspected(capsys, folder, "--model", model)
    assert (code, report["unchecked_base_weights"]) == (0, [])
    weight[[7, 60]] *= 3
    rewrite_weights(folder, repeat)
    code, report = inspected(capsys, folder, "--model", model)
    assert code == 1
    assert "differ from this model's for the tokens 7, 60:" in report["refused"]
