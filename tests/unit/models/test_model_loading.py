"""Every weight is filled exactly once, or loading says what is wrong and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyroots.errors import ModelError
from manyroots.models.load import load_model
from manyroots.models.weights.safetensors import INDEX_FILE, SINGLE_FILE
from manyroots.text.tokenizer_files import load_tokenizer
from tests.unit.models.tiny import load_tiny, save_tiny, tensors_of, tiny_source

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def test_shards_load_as_one_file_does(folder: Path) -> None:
    whole = tensors_of(load_tiny(folder))
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    sharded = tensors_of(load_tiny(folder))
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)

    # Of a folder with both, transformers reads the single file.
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    doubled = tensors_of(load_tiny(folder))
    assert all(torch.equal(whole[name] * 2, doubled[name]) for name in whole)
    (folder / SINGLE_FILE).unlink()

    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors.*copy the missing files"):
        load_tiny(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": "../../secret"}}'])
def test_a_broken_or_hostile_index_is_refused(folder: Path, text: str) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        load_tiny(folder)


def test_missing_and_unexpected_tensors_are_named(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.9.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    rewrite(folder, change)
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight; "):
        load_tiny(folder)
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.9\.extra\.weight\. "):
        load_tiny(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8, 48)}))
    with pytest.raises(ModelError, match=r"k_proj\.weight.*\[8, 48\].*\[16, 48\]"):
        load_tiny(folder)


def stack_experts(folder: Path, *, keep: bool) -> None:
    """Write the experts as transformers 5 has them in memory; `keep` leaves the others, too."""

    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(3):
            block = f"model.layers.{layer}.mlp.experts"

            def of_all(part: str, block: str = block) -> Tensor:
                take = tensors.__getitem__ if keep else tensors.pop
                return torch.stack([take(f"{block}.{e}.{part}.weight") for e in range(8)])

            tensors[f"{block}.gate_up_proj"] = torch.cat(
                [of_all("gate_proj"), of_all("up_proj")], dim=1
            )
            tensors[f"{block}.down_proj"] = of_all("down_proj")

    rewrite(folder, change)


def test_stacked_experts_load_as_single_ones_do(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-moe")
    single = tensors_of(load_tiny(tmp_path))
    stack_experts(tmp_path, keep=False)
    stacked = tensors_of(load_tiny(tmp_path))
    assert all(torch.equal(single[name], stacked[name]) for name in single)


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-moe")
    stack_experts(tmp_path, keep=True)
    with pytest.raises(ModelError, match=r"experts\.0\.\w+\.weight twice.*Export"):
        load_tiny(tmp_path)


def test_experts_of_another_number_or_size_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3-moe")
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"missing {name}; unexpected nothing"):
        load_tiny(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(23, 48)}))
    with pytest.raises(ModelError, match=rf"{name}.*\[23, 48\].*\[24, 48\]"):
        load_tiny(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(24, 48)}))
    stack = "model.layers.1.mlp.experts.up_proj"
    rewrite(tmp_path, lambda tensors: tensors.update({stack: torch.zeros(24, 48)}))
    with pytest.raises(ModelError, match=rf"missing nothing; unexpected {stack}\."):
        load_tiny(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_whole_numbers_that_no_config_explains_are_not_taken_for_weights(
    dtype: torch.dtype, folder: Path
) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = (100 * tensors[name]).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} of .* is in {dtype}.*quantized"):
        load_tiny(folder)


def test_extras_that_follow_from_the_config_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-tied")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(tmp_path, change)
    load_tiny(tmp_path)


def test_an_untied_head_may_not_be_missing(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        load_tiny(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read.*again"):
        load_tiny(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model.safetensors", load_tiny),
        ("m.gguf", lambda folder: load_tiny(folder / "m.gguf")),
        ("tokenizer.json", lambda folder: load_tokenizer(str(folder))),
    ],
)
def test_a_file_that_was_cloned_without_lfs_says_so(
    name: str, load: Callable[[Path], Any], folder: Path
) -> None:
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelError, match=f"{name}.*pointer of Git LFS.*git lfs pull"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "consolidated.safetensors"], ids=["shard", "own"]
)
def test_weights_without_an_index_are_named(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"has {name}, and neither.*Download or copy the index"):
        load_tiny(folder)


def test_r05_pickles_are_never_opened(folder: Path) -> None:
    """R05: a folder with only .bin weights is refused with the remedy."""
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*save_pretrained"):
        load_tiny(folder)


def test_a_gguf_file_beside_a_config_is_named(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / "model-Q4_K_M.gguf").touch()
    with pytest.raises(ModelError, match=r"model-Q4_K_M\.gguf.*pass the file .*load-format gguf"):
        load_tiny(folder)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors.*dummy"):
        load_tiny(folder)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe-mixed"])
def test_dummy_weights_need_no_files_and_depend_on_the_seed_alone(kind: str) -> None:
    def dummy(seed: int) -> dict[str, Tensor]:
        model = load_model(
            tiny_source(kind), dtype=torch.bfloat16, device=CPU, load_format="dummy", seed=seed
        )
        return tensors_of(model)

    first, again, other = dummy(1), dummy(1), dummy(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(first[embedding], other[embedding])
    assert first["model.norm.weight"].eq(1).all()
    assert first["model.layers.0.self_attn.q_norm.weight"].eq(1).all()
    assert all(weight.isfinite().all() for weight in first.values())


@pytest.mark.parametrize("kind", ["llama-tied", "lfm2", "falcon-h1"])
def test_a_decoder_that_was_saved_without_its_head_loads(kind: str, tmp_path: Path) -> None:
    """Its names lack the prefix, as transformers writes them of a model without a head."""
    model: Any = save_tiny(tmp_path, kind, tie_word_embeddings=True)
    whole = tensors_of(load_tiny(tmp_path))
    config = (tmp_path / "config.json").read_text()
    model.base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / SINGLE_FILE))
    bare = tensors_of(load_tiny(tmp_path))
    assert all(torch.equal(whole[name], bare[name]) for name in whole)
