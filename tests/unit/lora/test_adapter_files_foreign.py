"""Folders as other programs leave them: read by their names, or refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyroots.errors import AdapterError
from manyroots.store.adapter_files import read_adapter
from manyroots.store.adapter_weights import AdapterWeights
from tests.helpers.adapter_folders import (
    CONFIG,
    WEIGHTS,
    ExpertFormat,
    Recipe,
    rewrite_config,
    rewrite_weights,
    tiny_targets,
    write_adapter,
)

DENSE = tiny_targets()
MOE = tiny_targets(num_experts=3, intermediate=24, is_interleaved=True)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
MLX: dict[str, Any] = {
    "fine_tune_type": "lora", "num_layers": 2, "model": "a/model",
    "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
}  # fmt: skip


def read(folder: Path, targets: Any = DENSE) -> AdapterWeights:
    return read_adapter(folder, targets, max_rank=16, dtype=torch.float32, vocab_size=64)[1]


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    rewrite_weights(folder, rename)


def as_mlx(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        for ours, theirs in ((".lora_A.weight", ".lora_a"), (".lora_B.weight", ".lora_b")):
            if name.endswith(ours):
                own = name.removeprefix("base_model.model.").replace(ours, theirs)
                tensors[own] = tensors.pop(name).T.contiguous()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_w12_a_file_that_was_cloned_without_lfs_is_called_so(name: str, tmp_path: Path) -> None:
    """W12: by its name, with the command that fetches it."""
    write_adapter(tmp_path, DENSE, Recipe(modules=("q_proj",)))
    (tmp_path / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    )
    with pytest.raises(AdapterError, match=f"{name}.*pointer of Git LFS.*git lfs pull in"):
        read(tmp_path)


def test_w12_an_adapter_of_mlx_is_called_so(tmp_path: Path) -> None:
    """W12: by its file, by its config where the file was renamed, and by its tensors."""
    write_adapter(tmp_path, DENSE, Recipe(modules=("q_proj",)))
    peft = (tmp_path / CONFIG).read_text()
    rewrite_weights(tmp_path, as_mlx)
    (tmp_path / CONFIG).write_text(json.dumps(MLX))
    (tmp_path / WEIGHTS).rename(tmp_path / "adapters.safetensors")
    with pytest.raises(AdapterError, match=r"adapters.safetensors, as MLX writes it; convert"):
        read(tmp_path)
    (tmp_path / "adapters.safetensors").rename(tmp_path / WEIGHTS)
    with pytest.raises(AdapterError, match="lora_parameters is an option of MLX; convert"):
        read(tmp_path)
    (tmp_path / CONFIG).write_text(peft)
    with pytest.raises(AdapterError, match=r"q_proj.lora_a' is a factor as MLX writes it; convert"):
        read(tmp_path)


def test_w12_a_folder_of_several_adapters_names_those_in_it(tmp_path: Path) -> None:
    """W12: as PEFT leaves it where no adapter is called default, and trainers with checkpoints."""
    for name in ("sql", "poet"):
        write_adapter(tmp_path / name, DENSE)
    with pytest.raises(AdapterError, match=f"has no {CONFIG}, and poet, sql in it may: give"):
        read(tmp_path)
    read(tmp_path / "sql")


@pytest.mark.parametrize("other", ["adapter_0.pt", "model.safetensors", "adapter.gguf"])
def test_w12_weights_of_another_name_are_named(tmp_path: Path, other: str) -> None:
    """W12: of torchtune, of a merged model, of llama.cpp."""
    write_adapter(tmp_path, DENSE)
    (tmp_path / WEIGHTS).rename(tmp_path / other)
    with pytest.raises(AdapterError, match=f"has no {WEIGHTS} but {other}; save"):
        read(tmp_path)


def test_w12_a_config_that_does_not_say_its_kind_says_how_to(tmp_path: Path) -> None:
    """W12."""
    write_adapter(tmp_path, DENSE)
    rewrite_config(tmp_path, peft_type=...)
    with pytest.raises(AdapterError, match=r'peft_type is None.*"peft_type": "LORA"'):
        read(tmp_path)


@pytest.mark.parametrize("part", [torch.empty(0), torch.empty(4 * 32)])
def test_w12_a_part_that_one_process_had_is_called_so(tmp_path: Path, part: Tensor) -> None:
    """W12: DeepSpeed and FSDP leave such tensors in a checkpoint that was not gathered."""
    write_adapter(tmp_path, DENSE)
    rewrite_weights(tmp_path, lambda tensors: tensors.update({f"{Q}.lora_A.weight": part}))
    with pytest.raises(AdapterError, match=r"one process' part .*GatheredParameters"):
        read(tmp_path)


@pytest.mark.parametrize(
    "config", [{"r": 8}, {"rank_pattern": {".*q_proj": 2, "model.layers.0.self_attn.q_proj": 4}}]
)
def test_w12_a_rank_that_is_not_the_weights_says_where_it_is_from(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """W12: PEFT saves the keys of patterns in another order than they were given in."""
    write_adapter(tmp_path, DENSE)
    rewrite_config(tmp_path, **config)
    with pytest.raises(AdapterError, match=r"Correct r or rank_pattern .*alphabetical order"):
        read(tmp_path)


def test_w15_tinkers_names_of_attention_and_head_are_read(tmp_path: Path) -> None:
    """W15: beside its stacked experts; what it calls all-linear has the head in it."""
    recipe = Recipe(
        modules=("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
        experts=ExpertFormat.SHARED_OUTER, config={"target_modules": "all-linear"},
    )  # fmt: skip
    wanted = write_adapter(tmp_path, MOE, recipe)
    with pytest.raises(AdapterError, match="weights for lm_head, which its config leaves out"):
        read(tmp_path, MOE)
    renamed(
        tmp_path,
        lambda name: name.replace(".self_attn.", ".attn.").replace(
            "model.lm_head", "model.model.unembed_tokens"
        ),
    )
    found = read(tmp_path, MOE)
    assert found.pairs.keys() == wanted.keys()
    assert "lm_head" in wanted
    for name, pair in found.pairs.items():
        assert torch.equal(pair.a, wanted[name].a), name
        assert torch.equal(pair.b, wanted[name].b), name


def test_w15_mixtrals_names_of_router_and_experts_in_transformers_4_are_read(
    tmp_path: Path,
) -> None:
    """W15: most published adapters of Mixtral have them, in the config, too."""
    modules = ("q_proj", "gate", "gate_proj", "up_proj", "down_proj")
    wanted = write_adapter(tmp_path, MOE, Recipe(modules=modules))
    older = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def change(name: str) -> str:
        for now, before in older.items():
            name = name.replace(f".{now}.", f".{before}.")
        return name.replace(".mlp.", ".block_sparse_moe.")

    renamed(tmp_path, change)
    rewrite_config(tmp_path, target_modules=["q_proj", "gate", *older.values()])
    found = read(tmp_path, MOE)
    assert found.pairs.keys() == wanted.keys()
    assert any(name.endswith(".mlp.gate") for name in wanted)
    for name, pair in found.pairs.items():
        assert torch.equal(pair.a, wanted[name].a), name
        assert torch.equal(pair.b, wanted[name].b), name


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "o_proj"],
        r".*\.(q_proj|o_proj)",
        r"backbone\.layers\.\d+\.self_attn\.(q_proj|o_proj)",
        ["backbone.layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "o_proj"],
    ],
)
def test_w15_names_of_nemotrons_own_code_are_read(tmp_path: Path, targets: Any) -> None:
    """W15: it calls the model `backbone`, in the config, too."""
    wanted = write_adapter(tmp_path, DENSE, Recipe(modules=("q_proj", "o_proj")))
    renamed(tmp_path, lambda name: name.replace(".model.model.layers.", ".model.backbone.layers."))
    rewrite_config(tmp_path, target_modules=targets, rank_pattern={"backbone.layers.0.+": 4})
    found = read(tmp_path)
    assert found.pairs.keys() == wanted.keys()
    for name, pair in found.pairs.items():
        assert torch.equal(pair.a, wanted[name].a), name
        assert torch.equal(pair.b, wanted[name].b), name
    rewrite_config(tmp_path, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="o_proj, which its config leaves out"):
        read(tmp_path)
