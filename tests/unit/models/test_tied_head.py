"""A head that the config calls tied: whatever the checkpoint has, logits are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from manyroots.errors import ModelError
from manyroots.kernels.tolerances import assert_close
from manyroots.models.weights.safetensors import INDEX_FILE, SINGLE_FILE
from tests.unit.models.gguf_writing import write_gguf
from tests.unit.models.lockstep import in_lockstep
from tests.unit.models.paged import PagedModel
from tests.unit.models.test_logits_parity import prompts
from tests.unit.models.test_sharding import chunked, load_worker
from tests.unit.models.tiny import load_tiny, save_tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[dict[str, Tensor]], object]


def other_head(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors[HEAD] = torch.randn(tensors[EMBEDDING].shape, generator=generator) * 0.2


def one_other_number(tensors: dict[str, Tensor]) -> None:
    """In the last row, so that a comparison of the beginning alone would not see it."""
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1.0


CHECKPOINTS: dict[str, Change] = {
    "the embedding alone": lambda tensors: tensors.pop(HEAD, None),
    "both, equal": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "both, different": other_head,
    "both, one number different": one_other_number,
    "the head alone": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
}


def make(folder: Path, kind: str, change: Change, *, in_shards: bool = False) -> None:
    save_tiny(folder, kind)
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    if not in_shards:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    (folder / SINGLE_FILE).unlink()
    files = {name: f"part-{at}.safetensors" for at, name in enumerate(sorted(tensors))}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))


@torch.no_grad()
def check_logits(folder: Path, ours: dict[str, Tensor]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, tokens in prompts().items():
        wanted = theirs(input_ids=torch.tensor([tokens])).logits[0]
        assert_close("logits", ours[name], wanted, torch.float32)


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_whatever_a_tied_checkpoint_has_its_logits_are_transformers(
    checkpoint: str, kind: str, in_shards: bool, tmp_path: Path
) -> None:
    make(tmp_path, kind, CHECKPOINTS[checkpoint], in_shards=in_shards)
    check_logits(tmp_path, PagedModel(load_tiny(tmp_path)).step(prompts()))


def test_f01_nemotrons_head_is_its_own_whatever_its_config_ties(tmp_path: Path) -> None:
    """F01: transformers ties nothing there. Checkpoints call the embedding `embeddings`."""
    save_tiny(tmp_path, "nemotron-h", tie_word_embeddings=True)
    check_logits(tmp_path, PagedModel(load_tiny(tmp_path)).step(prompts()))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_w16_ranks_agree_whether_the_head_is_tied(checkpoint: str, tmp_path: Path) -> None:
    """W16: each rank looks at the checkpoint itself, and all see the same."""
    make(tmp_path, "llama-tied", CHECKPOINTS[checkpoint])
    results, _ = in_lockstep(2, lambda shard: chunked(load_worker(tmp_path, shard)))
    for result in results:
        check_logits(tmp_path, result)


def test_a_head_that_only_rounding_tells_apart_is_compared_as_it_is_served(tmp_path: Path) -> None:
    """transformers compares what it has loaded; in bfloat16 the two are one."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16().float()
        tensors[HEAD] = tensors[EMBEDDING] * (1 + 2**-20)

    make(tmp_path, "llama-tied", change)
    assert load_tiny(tmp_path, torch.bfloat16).spec.tie_word_embeddings
    assert not load_tiny(tmp_path, torch.float32).spec.tie_word_embeddings


def test_an_equal_head_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, "llama-tied", CHECKPOINTS["both, equal"])
    model = load_tiny(tmp_path)
    assert model.head.product.weight.data.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("checkpoint", ["the embedding alone", "both, equal", "both, different"])
def test_a_gguf_file_with_a_head_of_its_own_uses_it(checkpoint: str, tmp_path: Path) -> None:
    """A GGUF file says by the tensor's presence whether the head is tied."""
    make(tmp_path / "folder", "llama-tied", CHECKPOINTS[checkpoint])
    state = load_file(tmp_path / "folder" / SINGLE_FILE)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").config
    file = write_gguf(tmp_path / "model.gguf", config, state)
    check_logits(tmp_path / "folder", PagedModel(load_tiny(file)).step(prompts()))


def test_a_head_of_another_shape_is_named(tmp_path: Path) -> None:
    make(tmp_path, "llama-tied", lambda tensors: tensors.update({HEAD: torch.zeros(5, 48)}))
    with pytest.raises(ModelError, match=r"lm_head\.weight.*\[5, 48\].*\[97, 48\]"):
        load_tiny(tmp_path)


def test_neither_embedding_nor_head_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "llama-tied", lambda tensors: tensors.pop(EMBEDDING))
    with pytest.raises(ModelError, match=r"missing model\.embed_tokens\.weight"):
        load_tiny(tmp_path)
